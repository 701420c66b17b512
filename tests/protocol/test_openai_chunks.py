"""The chunks of a streamed OpenAI answer add up to the object of the answer without streaming."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.protocol.openai_batch import ChunkFold

_WHOLE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 5,
    "model": "m",
    "system_fingerprint": "fp",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello there",
                "refusal": "I cannot",
                "reasoning_content": "Let me think",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
                    {"id": "b", "type": "function", "function": {"name": "find", "arguments": "{}"}},
                ],
            },
            "logprobs": {"content": [{"token": "H", "logprob": -1.0}, {"token": "i", "logprob": -2.0}]},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


def _pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def _chunks(cuts: list[int]) -> list[dict[str, Any]]:
    choice = _WHOLE["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
    for name in ("reasoning_content", "refusal", "content"):
        deltas += [{name: piece} for piece in _pieces(message[name], cuts)]
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        head = {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, **call, "function": head}]})
        deltas += [
            {"tool_calls": [{"index": index, "id": None, "function": {"arguments": piece}}]}
            for piece in _pieces(function["arguments"], cuts)
        ]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    for entry, piece in zip(choice["logprobs"]["content"], choices[1:], strict=False):
        piece["logprobs"] = {"content": [entry]}
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    head = {key: value for key, value in _WHOLE.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    found = [{**head, "choices": [choice], "usage": None} for choice in choices]
    return [*found, {**head, "choices": [], "usage": _WHOLE["usage"]}]


@given(st.lists(st.integers(0, 40), max_size=6))
def test_whatever_the_pieces_nothing_of_the_answer_is_lost(cuts: list[int]) -> None:
    fold = ChunkFold()
    chunks = _chunks(cuts)
    before = json.dumps(chunks)
    for chunk in chunks:
        fold.add(chunk)
    assert fold.whole() == _WHOLE
    assert json.dumps(chunks) == before


def test_texts_and_their_logprobs_and_several_choices() -> None:
    fold = ChunkFold()
    for index, text in ((1, "b"), (0, "a"), (1, "c")):
        logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": None}
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
        fold.add({"id": "x", "object": "text_completion", "choices": [choice]})
    first, second = fold.whole()["choices"]
    assert (first["text"], second["text"]) == ("a", "bc") and fold.whole()["object"] == "text_completion"
    assert second["logprobs"] == {"tokens": ["b", "c"], "token_logprobs": [-1.0, -1.0], "top_logprobs": None}
