"""Generates greedily with a transformers model, as a user would write it: all requests of a batch step together.

A request is ``{"prompt": …, "max_new_tokens": …, "stream": …}``. Each piece is a server-sent event with the id of a
token, and with the numbers of tokens of the prompt and of the answer so far. Without ``stream``, the answer is one
event with all ids.
"""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler


class Generate(BaseHandler):
    def initialize(self, context):
        path = context.model_yaml_config["handler"]["model_path"]
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.initialized = True

    def handle(self, data, context):
        requests = [self.decoded(row.get("body") or row.get("data")) for row in data]
        wanted = max(request["max_new_tokens"] for request in requests)
        encoded = self.tokenizer([request["prompt"] for request in requests], padding=True, return_tensors="pt")
        ids, mask, cache = encoded["input_ids"], encoded["attention_mask"], None
        lengths, answers = mask.sum(-1).tolist(), [[] for _ in requests]
        shown = 1 if requests[0]["stream"] else wanted  # how many tokens an event has
        for step in range(wanted):
            with torch.inference_mode():
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            cache = out.past_key_values
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            for answer, token in zip(answers, ids[:, 0].tolist(), strict=True):
                answer.append(token)
            if shown == 1 or step == wanted - 1:
                events = [self.event(answer, shown, length) for answer, length in zip(answers, lengths, strict=True)]
            if shown == 1 and step < wanted - 1:
                send_intermediate_predict_response(events, context.request_ids, "ok", 200, context)
        return events

    @staticmethod
    def event(answer, shown, length):
        found = {"tokens": answer[-shown:], "prompt_tokens": length, "new_tokens": len(answer)}
        return f"data: {json.dumps(found)}\n\n"

    @staticmethod
    def decoded(body):
        return json.loads(body) if isinstance(body, (bytes, bytearray, str)) else body
