"""An OpenAI body is decoded to the same request as a V2 body with the same content."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput, UnknownModel
from mlserver_torch_stream.protocol.openai_batch import check_model, is_answered, read_body
from mlserver_torch_stream.protocol.openai_request import decode_body
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.openai_stream import describe
from mlserver_torch_stream.protocol.spelling import PostedBody
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.protocol.values import MAX_CONTAINERS, MAX_KEYS, MAX_STRINGS, parse_bounded, parse_json
from mlserver_torch_stream.server.rest.connection import parse_object
from mlserver_torch_stream.types import GenerationRequest, ModelInfo

_INFO = ModelInfo(
    vocab_size=1000,
    max_model_len=64,
    max_num_seqs=4,
    has_chat_template=True,
    tool_parser="hermes",
    template_arguments=frozenset({"tools"}),
)
_TALK = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
_TOOLS = [{"type": "function", "function": {"name": "f"}}]

_BODIES: list[dict[str, Any]] = [
    {"messages": _TALK},
    {"messages": _TALK, "tools": _TOOLS},
    {"messages": _TALK, "tools": _TOOLS, "tool_choice": "none"},
    {"messages": _TALK, "tools": _TOOLS, "tool_choice": "required"},
    {"messages": _TALK, "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": _TALK, "chat_template_kwargs": {"tokenize": True}},
    {"messages": _TALK, "priority": 3, "timeout": 2_000_000},
    {"messages": _TALK, "stream_mode": "prompt"},
    {"messages": [], "max_tokens": 3},
    {"prompt": "x", "temperature": 0.5, "seed": 3, "n": 2, "stop": ["a"], "max_completion_tokens": 9},
    {"prompt": "x", "tool_choice": "none"},
    {"prompt": "x", "echo": True},
    {"prompt": "x", "echo": True, "exclude_input_in_output": True},
    {"prompt": ""},
    {"prompt": "x", "max_tokns": 3},
    {"prompt": "x", "response_format": {"type": "json_object"}},
    {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
]


def _as_v2(body: Mapping[str, Any]) -> InferenceRequest:
    tensors = {"messages": json.dumps(body["messages"])} if "messages" in body else {"text_input": body["prompt"]}
    if "tools" in body:
        tensors["tools"] = json.dumps(body["tools"])
    inputs = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]} for name, text in tensors.items()]
    rest = {key: value for key, value in body.items() if key not in ("messages", "prompt", "tools")}
    return InferenceRequest.model_validate({"inputs": inputs, "parameters": {"llm_parameters": rest}})


def _outcome(decode: Any) -> GenerationRequest | str:
    try:
        request: GenerationRequest = decode()
    except InvalidInput as error:
        return error.message.replace("text_input", "prompt")
    return request


@pytest.mark.parametrize("body", _BODIES, ids=lambda body: json.dumps(body)[:60])
def test_both_spellings_say_the_same_or_refuse_the_same_by_the_same_name(body: dict[str, Any]) -> None:
    here = _outcome(lambda: decode_body(body, _INFO, "r"))
    there = _outcome(lambda: decode_request(_as_v2(body), _INFO, streaming=False, request_id="r"))
    if isinstance(here, str) or isinstance(there, str):
        assert here == there
        return
    for name in ("prompts", "sampling", "stream_mode", "priority", "timeout_s"):
        assert getattr(here, name) == getattr(there, name), name
    assert here.reply.echo_prompt == there.reply.echo_prompt


def test_bad_input_and_unknown_models_have_openais_statuses() -> None:
    with pytest.raises(InvalidInput) as invalid:
        read_body({"url": "/v1/embeddings", "body": {"prompt": "x"}})
    status, error = describe(invalid.value)
    assert status == 400 and (error["type"], error["param"]) == ("invalid_request_error", "url")
    with pytest.raises(UnknownModel) as unknown:
        check_model({"model": "b"}, {"a"})
    status, error = describe(unknown.value)
    assert status == 404 and error["code"] == "model_not_found"
    check_model({"model": None}, ())


def test_an_output_line_is_answered_by_status_200_alone() -> None:
    assert is_answered({"error": None, "response": {"status_code": 200}})
    assert not is_answered({"error": None, "response": {"status_code": 400}})
    assert not is_answered({"error": {"code": "missing"}, "response": None})


_MANY = MAX_CONTAINERS + 1


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [' + b"[]," * MAX_CONTAINERS + b"1]}",
        b'{"a": [' + b"{}," * MAX_CONTAINERS + b"1]}",
        b'{"a": ["\\"", ' + b'"[",[],' * MAX_CONTAINERS + b"1]}",
        b"[" * _MANY,  # no JSON at all: the bound comes first
    ],
    ids=["lists", "objects", "among strings", "open"],
)
def test_too_many_lists_and_objects_are_refused_before_they_are_read(raw: bytes) -> None:
    with pytest.raises(ValueError, match=f"has more than {MAX_CONTAINERS} lists and objects"):
        parse_bounded(raw)
    with pytest.raises(ValueError, match="has more than"):
        parse_json(raw.decode())
    with pytest.raises(InvalidInput, match=r"^body: has more than"):
        parse_object(raw)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b'{"a":' + b'"\\":",' * 9 + b'"' * (2 * MAX_STRINGS + 2 * MAX_KEYS) + b"}", "strings and keys"),
        (b"{" + b'"[":1,' * MAX_KEYS + b'"a":1}', "keys"),
    ],
    ids=["strings", "keys"],
)
def test_too_many_strings_or_keys_are_refused_before_they_are_read(raw: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=f"has more than [0-9]+ {what}$"):
        parse_bounded(raw)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [[]] * (MAX_CONTAINERS - 2)},
        {"prompt": "[{" * _MANY},
        {"prompt": "a: b, " * _MANY, '":': ['":"'] * (MAX_STRINGS - 1)},
        {"prompt": '\\"[' * _MANY, "b": "\\", "c": ["[", "{"] * 10},
        ["[\\", "\\\\[", "\\\\\\", "["] * MAX_CONTAINERS,
        [],
    ],
    ids=["most", "in a string", "keys in strings", "behind escapes", "in strings", "none"],
)
def test_brackets_in_strings_do_not_count(value: Any) -> None:
    assert parse_bounded(orjson.dumps(value)) == value


@pytest.mark.parametrize("raw", [b"", b"{", b"NaN", b'"\xff"', b'"\\ud800"', b"[" * 5000])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="is not valid JSON"):
        parse_bounded(raw)


def test_a_lone_surrogate_of_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        parse_json('"\ud800"')
    assert math.isclose(parse_json("0.5"), 0.5)


_RECORD = Path(__file__).with_name("openai_refusals.jsonl")
_TINY_INFO = ModelInfo(
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=4,
    has_chat_template=True,
    tool_parser="hermes",
    template_arguments=frozenset({"tools"}),
)


@pytest.mark.parametrize("path", OPENAI_SPELLINGS)
def test_a_refusal_names_the_field_that_it_has_named(path: str) -> None:
    found, recorded = [], []
    for line in _RECORD.read_text(encoding="utf-8").splitlines():
        endpoint, body, field, hint = json.loads(line)
        if path == f"/v1/{endpoint}":
            recorded.append((body, field, hint))
            found.append((body, *_refusal(path, body)))
    assert len(recorded) > 200
    assert [each for each in zip(recorded, found, strict=True) if each[0] != each[1]] == []


def _refusal(path: str, body: dict[str, object]) -> tuple[str | None, bool]:
    posted = PostedBody(body)
    try:
        OPENAI_SPELLINGS[path].decode(posted, _TINY_INFO, streaming=body.get("stream") is True, request_id="r")
    except InvalidInput as refusal:
        assert refusal.status == 422
        return refusal.field, "did you mean" in refusal.message
    return None, False
