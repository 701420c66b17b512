"""Handlers that generate with transformers and stream tokens or words: pieces in order, for several requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server.harness import Model, Server, serve
from tests.torchserve.predicting import SETTINGS, SHIM, TORCHSERVE
from tests.torchserve.test_predictions import _chunks
from tests.torchserve.workshop import write_handler

pytestmark = pytest.mark.slow  # three workers import torch
_TOKENS = 32
_PROMPTS = ("abc", "cba")
_TIMEOUT_S = 60.0

_LOADS = f"""
import torch
from threading import Thread
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler

MAX_NEW_TOKENS = {_TOKENS}

class StreamingLLMHandler(BaseHandler):
    def initialize(self, ctx):
        self.context = ctx
        path = ctx.model_yaml_config["handler"]["model_path"]
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.model.generation_config.eos_token_id = None
        self.initialized = True

    def preprocess(self, requests):
        texts = [row.get("data") or row.get("body") for row in requests]
        texts = [text if isinstance(text, str) else text.decode() for text in texts]
        return self.tokenizer(texts, return_tensors="pt")

    def postprocess(self, texts):
        return texts
"""
# Computes one token after the other for the whole batch; the last one's text is the result.
_LOOP = (
    _LOADS
    + """
    @torch.no_grad()
    def inference(self, input_batch):
        input_ids = input_batch["input_ids"]
        for step in range(MAX_NEW_TOKENS):
            token = self.model(input_ids).logits[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token], dim=-1)
            texts = self.tokenizer.batch_decode(token)
            if step == MAX_NEW_TOKENS - 1:
                return texts
            send_intermediate_predict_response(
                texts, self.context.request_ids, "Intermediate Prediction success", 200, self.context
            )
"""
)
# Generates in a thread, and takes the texts from transformers' streamer; the last one is the result.
_THREAD = (
    _LOADS
    + """
    def inference(self, input_batch):
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True)
        options = {"streamer": streamer, "max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
        thread = Thread(target=self.model.generate, kwargs={**input_batch, **options})
        thread.start()
        last = ""
        for text in filter(None, streamer):
            if last:
                send_intermediate_predict_response(
                    [last], self.context.request_ids, "Intermediate Prediction success", 200, self.context
                )
            last = text
        thread.join()
        return [last]
"""
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """``loop`` answers two requests in a batch, ``thread`` in two workers."""
    folder = tmp_path_factory.mktemp("streaming")
    where = {"handler": {"model_path": str(tiny_model)}}
    batches, workers = {"batchSize": 2, "maxBatchDelay": 1000}, {"minWorkers": 2, "maxWorkers": 2}
    models = [
        Model(name, write_handler(folder / name, source, {**where, **config}), implementation=TORCHSERVE, extra=SHIM)
        for name, source, config in (("loop", _LOOP, batches), ("thread", _THREAD, workers))
    ]
    with serve(folder / "models", models, settings=SETTINGS) as running:
        yield running


def _loop_pieces(model: Any, tokenizer: Any, prompt: str) -> list[str]:
    found = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=_TOKENS, do_sample=False)
    return [tokenizer.decode(token) for token in found[0, -_TOKENS:]]


def _thread_pieces(model: Any, tokenizer: Any, prompt: str) -> list[str]:
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {"streamer": streamer, "max_new_tokens": _TOKENS, "do_sample": False}
    thread = Thread(target=model.generate, kwargs={**tokenizer(prompt, return_tensors="pt"), **options})
    thread.start()
    pieces = [text for text in streamer if text]
    thread.join()
    return pieces


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[[str, str], list[str]]:
    """A function that returns what transformers itself generates, split as each handler does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len({len(tokenizer(prompt)["input_ids"]) for prompt in _PROMPTS}) == 1  # they make a batch without padding
    divided = {"loop": _loop_pieces, "thread": _thread_pieces}
    return lambda name, prompt: divided[name](model, tokenizer, prompt)


@pytest.mark.parametrize("name", ["loop", "thread"])
def test_each_piece_of_requests_at_once_is_a_chunk_of_its_own_request(
    server: Server, expected: Callable[[str, str], list[str]], name: str
) -> None:
    wanted = [expected(name, prompt) for prompt in _PROMPTS]
    assert wanted[0] != wanted[1] and all(len(pieces) > 2 for pieces in wanted)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda prompt: _chunks(server, f"predictions/{name}", prompt.encode()), _PROMPTS))
    assert [[chunk.decode() for chunk in chunks] for _, chunks in found] == wanted
    assert all(b"\r\nts_stream_next: true\r\n" in head for head, _ in found)


@pytest.mark.parametrize("name", ["loop", "thread"])
def test_the_last_piece_alone_has_v2s_final_flag(
    server: Server, expected: Callable[[str, str], list[str]], name: str
) -> None:
    body = {"inputs": [{"name": "body", "datatype": "BYTES", "shape": [1], "data": [_PROMPTS[0]]}]}
    answer = plain_http.post(f"{server.url}/v2/models/{name}/infer_stream", json=body, timeout=_TIMEOUT_S)
    events = [json.loads(event) for event in EventParser().feed(answer.content)]
    wanted = expected(name, _PROMPTS[0])
    assert [event["outputs"][0]["data"] for event in events] == [[piece] for piece in wanted]
    finals = [event["parameters"]["triton_final_response"] for event in events]
    assert finals == [False] * (len(wanted) - 1) + [True]
