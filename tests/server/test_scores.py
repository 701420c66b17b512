"""Scores of prompts on a real server: ``echo`` with ``logprobs`` as lm-eval sends it, and V2's ``prompt_logprobs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import plain_http
from tests.server.harness import Server
from tests.server.openai import TEXT, joined, post, prompt, refused, stream, whole

_SAID = "The quick brown fox streams its answer, token by token: 5 €. " * 3
_IDS = [40, 41, 42, 7, 300, 9]


class Model:
    """The server's model and tokenizer, loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return Model(tiny_model)


def check(model: Model, choice: dict[str, Any], ids: list[int], top: int, answered: int) -> None:
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["text_offset"]) == len(ids) + answered
    assert shown["token_logprobs"][0] is None and shown["text_offset"][0] == 0
    table = model.logprobs(ids)
    expected = [float(table[position, token_id]) for position, token_id in enumerate(ids[1:])]
    assert shown["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    if top == 0:
        assert shown["top_logprobs"] is None
        return
    assert shown["top_logprobs"][0] is None
    for position, named in enumerate(shown["top_logprobs"][1 : len(ids)]):
        best = table[position].topk(top).values.tolist()
        assert sorted(named.values())[-top:] == pytest.approx(sorted(best), abs=1e-4)
        assert shown["token_logprobs"][position + 1] in named.values()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_echo_with_logprobs_scores_texts_and_ids(server: Server, model: Model, top: int, count: int) -> None:
    body = {"logprobs": top, "echo": True, "max_tokens": count, "temperature": 0, "seed": 1234, "ignore_eos": True}
    ids = model.tokenizer.encode(_SAID)
    for sent in ([_SAID, "Hello there"], [_IDS, ids]):
        answer = whole(server, TEXT, prompt(sent, **body))
        for each, choice in zip(sent, answer["choices"], strict=True):
            known = model.tokenizer.encode(each) if isinstance(each, str) else each
            check(model, choice, known, top, count)
            assert choice["finish_reason"] == "length"
            said = each if isinstance(each, str) else model.tokenizer.decode(each)
            assert choice["text"].startswith(said) and (count or choice["text"] == said)
        assert answer["usage"]["completion_tokens"] == 2 * count


def test_a_streamed_echo_begins_with_the_prompt_and_its_scores(server: Server, model: Model) -> None:
    body = prompt([_SAID, "Hello"], logprobs=2, echo=True, max_tokens=3, ignore_eos=True)
    answer, chunks = whole(server, TEXT, body), stream(server, TEXT, body)
    assert joined(chunks) == [choice["text"] for choice in answer["choices"]]
    for choice in answer["choices"]:
        parts = [
            part["logprobs"]
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"] and part["logprobs"] is not None
        ]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [each for part in parts for each in part[name]] == choice["logprobs"][name]
    plain = prompt(_SAID, echo=True, max_tokens=2, ignore_eos=True)
    assert joined(stream(server, TEXT, plain))[0] == whole(server, TEXT, plain)["choices"][0]["text"]


def test_v2_has_the_scores_as_an_output(server: Server, model: Model) -> None:
    ids = model.tokenizer.encode(_SAID)
    parameters = {"prompt_logprobs": 2, "max_tokens": 0}
    tensor = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": [_SAID, "Hello"]}
    body = {"inputs": [tensor], "parameters": parameters}
    response = plain_http.post(f"{server.url}/v2/models/tiny/infer", json=body)
    outputs = {each["name"]: each["data"] for each in response.json()["outputs"]}
    assert outputs["text_output"] == ["", ""] and outputs["num_output_tokens"] == [0, 0]
    first, *others = json.loads(outputs["prompt_logprobs"][0])
    assert first == {"token_id": ids[0], "logprob": None, "top": []}
    table = model.logprobs(ids)
    for position, entry in enumerate(others):
        assert entry["token_id"] == ids[position + 1]
        assert entry["logprob"] == pytest.approx(float(table[position, entry["token_id"]]), abs=1e-4)
        assert len(entry["top"]) == 2


def test_too_many_scores_are_refused_by_name(server: Server) -> None:
    response = post(server, TEXT, prompt([[7] * 900] * 60, echo=True, logprobs=20, max_tokens=0))
    assert response.status_code == 400 and refused(response)["param"] == "echo", response.text
