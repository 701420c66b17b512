"""The tensors of Seldon Core 2's OpenAI translator, in and out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.seldon_spelling import SELDON, spelling_of
from mlserver_torch_stream.protocol.spelling import ReplyContext
from mlserver_torch_stream.protocol.v2_outputs import as_response
from mlserver_torch_stream.types import (
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from tests.protocol.wire import T, Wire, over_rest, rest_json, rest_outputs, text

ONE = (text("user", name="role"), text("Hello!", name="content"), text("text", name="type"))
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    assert conversation(decode(payload, info)).tools == ({"type": "function", "function": {"name": "f"}},)


def test_one_assistant_message_may_be_only_tool_calls(info: ModelInfo) -> None:
    payload = over_rest(text("assistant", name="role"), text("text", name="type"),
                        text(json.dumps(CALL), name="tool_calls"))  # fmt: skip
    assert messages(payload, info) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


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
        ([*ONE, text("[3]", name="tools")], "tools"),
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
        "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
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
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert chunks == [{**head, "choices": [first]}, {**head, "choices": [last], "usage": usage}]


def test_logprobs_reach_the_openai_object(info: ModelInfo) -> None:
    body = {"logprobs": True, "top_logprobs": 1}
    request = decode(over_rest(*ONE, parameters={"llm_parameters": body}), info)
    entry = TokenLogprob(7, -0.5, ((7, -0.5),))
    event = TokenEvent(0, "h", (7,), (entry,), -0.5, FinishReason.STOP, Usage(4, 1))
    named = {"token": "token_id:7", "logprob": -0.5, "bytes": None}
    expected = {"content": [{**named, "top_logprobs": [named]}]}
    [body] = SELDON.stream(request, ReplyContext("model")).event(event)
    chunk = json.loads(rest_outputs(as_response(body))["output_all"][0])
    assert chunk["choices"][0]["logprobs"] == expected
    unary = SELDON.whole(request, ReplyContext("model"))
    unary.add(event)
    assert json.loads(rest_outputs(as_response(unary.body()))["output_all"][0])["choices"][0]["logprobs"] == expected
