"""Classifies texts with a model of DistilBERT's shape and random weights from a folder. Accepts ``{"text": …}``.

A batch is padded to 32 tokens. An answer is `p=` and the probability of the second class, to four digits.
"""

import json

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from ts.torch_handler.base_handler import BaseHandler

_MAX_TOKENS = 32
_ROWS = 50  # of a forward


class Classify(BaseHandler):
    def initialize(self, context):
        path = context.model_yaml_config["handler"]["model_path"]
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForSequenceClassification.from_pretrained(path).eval()
        self.initialized = True

    def handle(self, data, context):
        bodies = [row.get("body") or row.get("data") for row in data]
        texts = [(body if isinstance(body, dict) else json.loads(body))["text"] for body in bodies]
        found = []
        for begin in range(0, len(texts), _ROWS):
            encoded = self.tokenizer(
                texts[begin : begin + _ROWS],
                padding="max_length",
                max_length=_MAX_TOKENS,
                truncation=True,
                return_tensors="pt",
            )
            with torch.inference_mode():
                logits = self.model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
            found += logits.softmax(-1)[:, 1].tolist()
        return [f"p={each:.4f}" for each in found]
