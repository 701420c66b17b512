"""An OpenAI body is decoded as the V2 request that says the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput, UnknownModel
from mlserver_torch_stream.protocol.openai_batch import check_model, is_answered, read_body
from mlserver_torch_stream.protocol.openai_request import decode_body
from mlserver_torch_stream.protocol.openai_stream import describe
from mlserver_torch_stream.protocol.v2_request import decode_request
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
