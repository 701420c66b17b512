"""The tensors of Seldon Core 2's OpenAI translator, in requests and replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidInput,
    NotServing,
    QueueFull,
    RequestError,
    TimedOut,
    UnknownModel,
)
from mlserver_torch_stream.protocol.seldon_spelling import SELDON, spelling_of, warning_of_name
from mlserver_torch_stream.protocol.spelling import ReplyContext
from mlserver_torch_stream.protocol.v2_reply import as_response
from mlserver_torch_stream.types import (
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from tests.protocol.seldon_translator import SCANNER_BYTES, openai_body
from tests.protocol.wire import T, Wire, over_rest, rest_json, rest_outputs, text

ONE = (text("user", name="role"), text("Hello!", name="content"), text("text", name="type"))
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARSED = {**CALL, "function": {"name": "f", "arguments": {}}}  # as templates want it


def decode(payload: InferenceRequest, info: ModelInfo, *, streaming: bool = False) -> GenerationRequest:
    return SELDON.decode_message(payload, info, streaming=streaming, request_id="r1")


def conversation(request: GenerationRequest) -> ChatPrompt:
    [prompt] = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages(payload: InferenceRequest, info: ModelInfo) -> list[Any]:
    return list(conversation(decode(payload, info)).messages)


def refused(info: ModelInfo, *tensors: T) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode(over_rest(*tensors), info)
    return caught.value


def test_one_message_is_plain_strings(wire: Wire, info: ModelInfo) -> None:
    payload = wire(*ONE, parameters={"llm_parameters": {"max_tokens": 3, "user": "u"}, "kwargs": {"max_tokens": 3}})
    assert messages(payload, info) == [{"role": "user", "content": "Hello!"}]
    request = decode(payload, info)
    assert request.sampling.max_tokens == 3
    assert spelling_of(tensor.name for tensor in payload.inputs) is SELDON


def test_the_parts_of_one_message_are_joined(wire: Wire, info: ModelInfo) -> None:
    payload = wire(text("user", name="role"), text("a", "b", name="content"), text("text", "text", name="type"))
    assert messages(payload, info) == [{"role": "user", "content": "ab"}]


def test_a_stop_string_of_openais_client_is_taken_literally(wire: Wire, info: ModelInfo) -> None:
    """In any other V2 request, it would be parsed as a JSON list."""
    body = {"stop": '["a"]'}
    payload = wire(*ONE, parameters={"llm_parameters": body, "kwargs": body})
    assert decode(payload, info).sampling.stop == ('["a"]',)
    assert decode(over_rest(*ONE, parameters=body), info).sampling.stop == ("a",)


def test_several_messages_are_json_lists(wire: Wire, info: ModelInfo) -> None:
    payload = wire(
        text("system", "user", name="role"),
        text('["brief"]', '["a", "b"]', name="content"),
        text('["text"]', '["text", "text"]', name="type"),
    )
    assert messages(payload, info) == [{"role": "system", "content": "brief"}, {"role": "user", "content": "ab"}]


def test_a_plain_type_says_that_its_content_is_plain_too(info: ModelInfo) -> None:
    payload = over_rest(
        text("system", "user", name="role"), text("brief", "[1]", name="content"), text("text", "text", name="type")
    )
    assert [message["content"] for message in messages(payload, info)] == ["brief", "[1]"]


def test_tool_calls_and_their_answers_survive(wire: Wire, info: ModelInfo) -> None:
    payload = wire(
        text("user", "assistant", "tool", name="role"),
        text('["hi"]', '[""]', '["sunny"]', name="content"),
        text('["text"]', '["text"]', '["text"]', name="type"),
        text("", json.dumps([json.dumps(CALL)]), "", name="tool_calls"),
        text("", "", "c1", name="tool_call_id"),
        text(json.dumps({"type": "function", "function": {"name": "f"}}), name="tools"),
    )
    assert messages(payload, info) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [PARSED]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    assert conversation(decode(payload, info)).tools == ({"type": "function", "function": {"name": "f"}},)


def test_one_assistant_message_may_be_only_tool_calls(info: ModelInfo) -> None:
    payload = over_rest(text("assistant", name="role"), text("text", name="type"),
                        text(json.dumps(CALL), name="tool_calls"))  # fmt: skip
    assert messages(payload, info) == [{"role": "assistant", "content": "", "tool_calls": [PARSED]}]


def test_parts_that_are_not_text_are_refused_by_name(info: ModelInfo) -> None:
    error = refused(info, text("user", name="role"), text("a", "{}", name="content"),
                    text("text", "image_url", name="type"))  # fmt: skip
    assert error.field == "type"
    assert "image_url" in error.message


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ([text("Hello!", name="content")], "role"),
        ([text("user", "user", name="role"), text('["a"]', name="content")], "content"),
        ([text("user", "user", name="role"), text("a", "b", name="content")], "content"),
        ([text("user", "user", name="role"), text("[1]", "[2]", name="content")], "content"),
        ([text("user", "user", name="role"), text('["a"]', '["b"]', name="content"),
          text('["text", "text"]', '["text"]', name="type")], "type"),
        ([text("user", name="role"), text("a", name="content"), text("no json", name="tool_calls")], "tool_calls"),
        ([text("user", name="role"), text("a", name="content"), text("3", name="tool_calls")], "role"),
        ([text("", name="role"), text("a", name="content")], "role"),
        ([*ONE, text("[{}]", name="messages")], "role"),
        ([*ONE, text("[3]", name="tools")], "tools[0]"),
    ],
)  # fmt: skip
def test_broken_conversations_are_refused_by_name(info: ModelInfo, tensors: list[T], field: str) -> None:
    assert refused(info, *tensors).field == field


def test_the_outputs_of_a_conversation_can_be_named(info: ModelInfo) -> None:
    assert decode(over_rest(*ONE, outputs=["output_all"]), info).reply.outputs == frozenset({"output_all"})


def test_a_unary_reply_holds_the_whole_openai_object(info: ModelInfo) -> None:
    request = decode(over_rest(*ONE, parameters={"llm_parameters": {"n": 2}}), info)
    reply = SELDON.whole(request, ReplyContext("model", created=17))
    for index, answer in enumerate(("hé", "yo")):
        reply.add(TokenEvent(index, answer, finish_reason=FinishReason.STOP, usage=Usage(4, 3)))
    outputs = rest_outputs(as_response(reply.body()))
    assert outputs["role"] == ["assistant", "assistant"]
    assert outputs["content"] == outputs["text_output"] == ["hé", "yo"]
    assert outputs["type"] == ["text", "text"]
    [whole] = outputs["output_all"]
    assert json.loads(whole) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 17,
        "model": "model",
        "choices": [
            {"index": index, "message": {"role": "assistant", "content": answer}, "logprobs": None,
             "finish_reason": "stop"}
            for index, answer in enumerate(("hé", "yo"))
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10,
                  "prompt_tokens_details": {"cached_tokens": 0}},
    }  # fmt: skip


def test_every_streamed_response_holds_one_openai_chunk(info: ModelInfo) -> None:
    request = decode(over_rest(*ONE, parameters={"llm_parameters": {"stream": True}}), info, streaming=True)
    reply = SELDON.stream(request, ReplyContext("model", created=17))
    events = (
        TokenEvent(0, "h"),
        TokenEvent(0, "é", finish_reason=FinishReason.LENGTH, usage=Usage(4, 2)),
    )
    bodies = [rest_json(as_response(body)) for event in events for body in reply.event(event)]
    chunks = []
    for body in bodies:
        outputs = {output["name"]: output for output in body["outputs"]}
        assert {"role", "content", "type", "output_all"} <= outputs.keys()
        assert outputs["output_all"]["shape"] == [1]
        chunks.append(json.loads(outputs["output_all"]["data"][0]))
    head = {"id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 17, "model": "model"}
    first = {"index": 0, "delta": {"role": "assistant", "content": "h"}, "logprobs": None, "finish_reason": None}
    last = {"index": 0, "delta": {"content": "é"}, "logprobs": None, "finish_reason": "length"}
    cached = {"cached_tokens": 0}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": cached}
    assert chunks == [{**head, "choices": [first]}, {**head, "choices": [last], "usage": usage}]


def _objects(bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns what an OpenAI client gets from each response; the responses are valid for V2, too."""
    return [json.loads(rest_outputs(as_response(body))["output_all"][0]) for body in bodies]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.ERROR, GenerationFailed("it broke")),
        (FinishReason.ERROR, RuntimeError("it broke")),
        (FinishReason.TIMEOUT, TimedOut("it broke")),
        (FinishReason.ABORT, NotServing("it broke")),
    ],
)
def test_a_sequence_that_fails_ends_with_openais_error(info: ModelInfo, reason: FinishReason, error: Exception) -> None:
    """Text that came with the failure is sent in a chunk before it.

    No chunk has a finish reason that OpenAI does not define.
    """
    request = decode(over_rest(*ONE), info, streaming=True)
    reply = SELDON.stream(request, ReplyContext("model"))
    event = TokenEvent(0, "so far", (7,), finish_reason=reason, usage=Usage(4, 1), error=error)
    bodies = [body for part in event.split_failure() for body in reply.event(part)]
    chunk, failure = _objects(bodies)
    assert chunk["choices"][0]["delta"]["content"] == "so far" and chunk["choices"][0]["finish_reason"] is None
    assert failure == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": None}}
    assert [body["parameters"]["triton_final_response"] for body in bodies] == [False, True]
    assert [rest_outputs(as_response(body)).get("finish_reason") for body in bodies] == [None, [reason.value]]
    assert ["error" in body for body in bodies] == [False, True]


def test_an_error_ends_all_sequences_and_is_short_enough_for_the_proxy(info: ModelInfo) -> None:
    request = decode(over_rest(*ONE, parameters={"llm_parameters": {"n": 3}}), info, streaming=True)
    reply = SELDON.stream(request, ReplyContext("model"))
    reply.event(TokenEvent(1, "done", finish_reason=FinishReason.STOP, usage=Usage(4, 1)))
    bodies = reply.fail(RuntimeError("\x01" * 9999))
    assert [body["parameters"]["index"] for body in bodies] == [0, 2]
    for failure, body in zip(_objects(bodies), bodies, strict=True):
        assert set(failure) == {"error"} and len(failure["error"]["message"]) == 512
        assert len(json.dumps(body)) < SCANNER_BYTES


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidInput("n", "too many"), 422, "invalid_request_error", "n", None),
        (ContextLengthExceeded("text_input", 9, 8), 422, "invalid_request_error", "messages",
         "context_length_exceeded"),
        (UnknownModel("m"), 404, "invalid_request_error", "model", "model_not_found"),
        (QueueFull("full"), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (NotServing("draining"), 503, "server_error", None, None),
        (TimedOut("late"), 504, "server_error", None, None),
        (GenerationFailed("broken"), 500, "server_error", None, None),
    ],
)  # fmt: skip
def test_an_error_is_v2s_and_openais(
    error: RequestError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    answered, body = SELDON.refusal(error)
    assert answered == status and body["error"] == error.message
    described = json.loads(openai_body(json.dumps(body).encode()))["error"]
    assert {**described, "message": ""} == {"message": "", "type": kind, "param": param, "code": code}
    assert described["message"] == error.message.replace("text_input", "messages")


@pytest.mark.parametrize("tensor", ["role", "content", "type", "tool_calls", "tool_call_id", "text_input"])
def test_an_error_of_a_tensor_is_one_of_the_messages_to_openais_client(tensor: str) -> None:
    _, body = SELDON.refusal(InvalidInput(tensor, "is wrong"))
    error = json.loads(body["outputs"][0]["data"][0])["error"]
    assert (error["param"], error["message"]) == ("messages", "messages: is wrong")
    assert body["error"] == f"{tensor}: is wrong"


def test_the_usage_that_is_asked_for_is_a_chunk_of_its_own(info: ModelInfo) -> None:
    """It is the last message of all, and is V2's final response, too."""
    options = {"stream_options": {"include_usage": True}, "n": 2}
    request = decode(over_rest(*ONE, parameters={"llm_parameters": options, "kwargs": options}), info, streaming=True)
    reply = SELDON.stream(request, ReplyContext("model"))
    events = (
        TokenEvent(1, "a", (7,)),
        TokenEvent(0, "b", (8,), finish_reason=FinishReason.STOP, usage=Usage(4, 2)),
        TokenEvent(1, "c", (9,), finish_reason=FinishReason.LENGTH, usage=Usage(4, 3)),
    )
    bodies = [body for event in events for body in reply.event(event)]
    *chunks, usage = _objects(bodies)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop", "length"]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "abc"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert [body["parameters"]["triton_final_response"] for body in bodies] == [False, False, False, True]
    reasons = [rest_outputs(as_response(body)).get("finish_reason") for body in bodies]
    assert reasons == [None, ["stop"], None, ["length"]]


@pytest.mark.parametrize(
    ("options", "streaming", "field"),
    [
        (3, True, "stream_options"),
        ({"include_usage": "yes"}, True, "stream_options.include_usage"),
        ({"include_usag": True}, True, "stream_options.include_usag"),
        ({"include_usage": True}, False, "stream_options"),
    ],
)
def test_wrong_stream_options_are_refused_by_name(info: ModelInfo, options: Any, streaming: bool, field: str) -> None:
    payload = over_rest(*ONE, parameters={"llm_parameters": {"stream_options": options}})
    with pytest.raises(InvalidInput) as caught:
        decode(payload, info, streaming=streaming)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("chat", None),
        ("chat-model_1", None),  # the version that Seldon adds
        ("chat_model", "chat-model"),
        ("my_chat_model_12", "my-chat-model"),
        ("chat_model_1_1", "chat-model-1"),
    ],
)
def test_a_name_that_the_proxy_cuts_short_is_warned_about(name: str, better: str | None) -> None:
    warning = warning_of_name(name)
    assert warning is None if better is None else warning is not None and f"'{better}'" in warning


def test_logprobs_reach_the_openai_object(info: ModelInfo) -> None:
    body = {"logprobs": True, "top_logprobs": 1}
    request = decode(over_rest(*ONE, parameters={"llm_parameters": body}), info)
    entry = TokenLogprob(7, -0.5, ((7, -0.5), (8, -2.0)), "é".encode(), ("é".encode(), b"\xc3"))
    event = TokenEvent(0, "h", (7,), (entry,), -0.5, FinishReason.STOP, Usage(4, 1))
    named = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    half = {"token": "\\xc3", "logprob": -2.0, "bytes": [195]}
    expected = {"content": [{**named, "top_logprobs": [named, half]}], "refusal": None}
    [body] = SELDON.stream(request, ReplyContext("model")).event(event)
    chunk = json.loads(rest_outputs(as_response(body))["output_all"][0])
    assert chunk["choices"][0]["logprobs"] == expected
    unary = SELDON.whole(request, ReplyContext("model"))
    unary.add(event)
    assert json.loads(rest_outputs(as_response(unary.body()))["output_all"][0])["choices"][0]["logprobs"] == expected
