"""The flat body of the generate extension means the same as a request in tensors, and its reply is flat, too."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext, StreamEncoder
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.types import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    SamplingParameters,
    TextPrompt,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from tests.protocol.asked import asked
from tests.protocol.wire import over_rest, text

_REQUEST = asked("Say: ", request_id="r1")
_EVENTS = (
    TokenEvent(0, "hé", (7,), (TokenLogprob(7, -0.5),), -0.5),
    TokenEvent(0, "!", (8,), (TokenLogprob(8, -1.0),), -1.5, FinishReason.STOP, Usage(4, 2)),
)


def _decode(body: dict[str, Any], info: ModelInfo, *, streaming: bool = False) -> GenerationRequest:
    return FLAT.decode(PostedBody(body), info, streaming=streaming, request_id="r")


def _read(body: JsonObject) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(orjson.dumps(body))
    return read


def _said(reply: StreamEncoder, event: TokenEvent) -> dict[str, Any]:
    [body] = reply.event(event)
    return _read(body)


def _unary(request: GenerationRequest, *events: TokenEvent) -> dict[str, Any]:
    reply = FLAT.whole(request, ReplyContext("model", "v1"))
    for event in events:
        reply.add(event)
    return _read(reply.body())


def test_only_a_text_input_at_the_top_makes_a_body_flat() -> None:
    assert FLAT.accepts({"text_input": "x"})
    assert not FLAT.accepts({"inputs": [{"name": "text_input"}], "parameters": {"text_input": "x"}})


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"prompt": "x"}, r" \(the body has 'prompt'\)"),
        ({"max_tokens": 3, "text_imput": "x"}, r" \(the body has 'text_imput'\)"),
        ({"inputs": "x"}, r" \(the body has 'inputs'\)"),
        ({"max_tokens": 3}, ""),
        ({}, ""),
    ],
)
def test_a_body_without_text_input_and_without_tensors_is_flat_and_lacks_it(
    info: ModelInfo, body: dict[str, Any], hint: str
) -> None:
    assert FLAT.accepts(body)
    with pytest.raises(InvalidInput, match=rf"^text_input: is missing{hint}; flat JSON needs its prompt there"):
        _decode(body, info)


def test_parameters_stand_at_the_top_or_nested(info: ModelInfo) -> None:
    top = _decode({"text_input": "x", "max_tokens": 5, "top_p": 0.5, "stop": ["a", "b"]}, info)
    nested = _decode({"text_input": "x", "parameters": {"max_tokens": 5, "top_p": 0.5, "stop": ["a", "b"]}}, info)
    assert top == nested
    assert top.prompts == (TextPrompt("x"),)
    assert (top.sampling.max_tokens, top.sampling.top_p, top.sampling.stop) == (5, 0.5, ("a", "b"))


def test_it_means_the_same_as_in_tensors(info: ModelInfo) -> None:
    parameters = {"temperature": 0.7, "seed": 3, "sampling_parameters": {"max_tokens": 4}, "return_logprobs": True}
    tensors = over_rest(text("x", "y"), parameters=parameters)
    assert _decode({"text_input": ["x", "y"], **parameters}, info) == decode_request(
        tensors, info, streaming=False, request_id="r"
    )


def test_its_id_is_the_requests() -> None:
    assert FLAT.request_id({"text_input": "x", "id": "mine"}) == "mine"
    assert FLAT.request_id({"text_input": "x"}) == ""


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text_input": 3}, "text_input"),
        ({"text_input": [["x"]]}, "text_input"),
        ({"text_input": []}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": "x", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "x", "max_tokenz": 1}, "max_tokenz"),
        ({"text_input": "x", "parameters": {"max_tokenz": 1}}, "max_tokenz"),
        ({"text_input": "x", "parameters": [1]}, "parameters"),
        ({"text_input": "x", "max_tokens": 1, "parameters": {"max_tokens": 2}}, "max_tokens"),
        ({"text_input": "x", "max_tokens": 1, "parameters": {"max_new_tokens": 2}}, "max_new_tokens"),
        ({"text_input": "x", "prompt": "y"}, "prompt"),
        ({"text_input": "x", "messages": []}, "messages"),
        ({"text_input": "x", "inputs": []}, "inputs"),
        ({"text_input": "x", "tools": []}, "tools"),
        ({"text_input": "x", "id": 7}, "id"),
        ({"text_input": "x", "stream": True}, "stream"),
        ({"text_input": "x", "stream_mode": "prompt"}, "stream_mode"),
        ({"text_input": "x", "lora_name": "l"}, "lora_name"),
        ({"text_input": "x", "details": 1}, "details"),
        ({"text_input": "x", "parameters": {"details": None}}, "details"),
        ({"text_input": "x", "details": True, "parameters": {"details": False}}, "details"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], field: str, info: ModelInfo) -> None:
    with pytest.raises(InvalidInput) as caught:
        _decode(body, info)
    assert field in str(caught.value)


def test_the_pieces_of_one_prompt_are_not_those_of_two(info: ModelInfo) -> None:
    with pytest.raises(InvalidInput, match="got 2 prompts"):
        _decode({"text_input": ["x", "y"], "stream_mode": "prompt"}, info, streaming=True)


def test_a_delta_is_exactly_this() -> None:
    reply = FLAT.stream(_REQUEST, ReplyContext("model", "v1"))
    assert _said(reply, _EVENTS[0]) == {
        "model_name": "model",
        "model_version": "v1",
        "id": "r1",
        "text_output": "hé",
        "index": 0,
        "chunk_index": 0,
        "triton_final_response": False,
    }
    last = _said(reply, _EVENTS[1])
    assert (last["text_output"], last["finish_reason"], last["triton_final_response"]) == ("!", "stop", True)
    assert (last["num_input_tokens"], last["num_output_tokens"]) == (4, 2)


def test_a_whole_reply_has_scalars_for_one_sequence_and_lists_for_several() -> None:
    one = _unary(_REQUEST, *_EVENTS)
    assert (one["text_output"], one["finish_reason"]) == ("hé!", "stop")
    events = [TokenEvent(index, str(index), finish_reason=FinishReason.LENGTH) for index in range(2)]
    two = _unary(replace(_REQUEST, sampling=SamplingParameters(n=2)), *events)
    assert (two["text_output"], two["finish_reason"]) == (["0", "1"], ["length", "length"])


def test_ids_are_always_a_list_and_logprobs_are_objects() -> None:
    shown = asked("Say: ", token_ids=True, logprobs=True)
    reply = FLAT.stream(shown, ReplyContext("model"))
    first = _said(reply, _EVENTS[0])
    assert first["token_ids"] == [7]
    assert first["logprobs"] == [{"token_id": 7, "logprob": -0.5, "top": []}]
    assert _unary(shown, *_EVENTS)["token_ids"] == [7, 8]


def test_a_failure_is_said_where_it_happens_and_on_the_final_reply() -> None:
    reply = FLAT.stream(replace(_REQUEST, sampling=SamplingParameters(n=2)), ReplyContext("model"))
    failed = TokenEvent(1, finish_reason=FinishReason.ERROR, error=RuntimeError("broken"))
    first = _said(reply, failed)
    last = _said(reply, TokenEvent(0, "x", finish_reason=FinishReason.STOP))
    assert first["error"] == "broken" and not first["triton_final_response"]
    assert last["error"] == "broken" and last["triton_final_response"] and last["text_output"] == "x"


def test_giving_up_ends_what_is_open_and_says_why() -> None:
    reply = FLAT.stream(replace(_REQUEST, sampling=SamplingParameters(n=3)), ReplyContext("model"))
    reply.event(TokenEvent(1, "x", finish_reason=FinishReason.STOP))
    bodies = reply.fail(RuntimeError("broken"))
    assert [(body["index"], body["error"]) for body in bodies] == [(0, "broken"), (2, "broken")]
    assert reply.fail(RuntimeError("again")) == []


# --- details ---

_DETAILED = asked("Say: ", request_id="r1", details=True)


def _detail(token_id: int, text: str, logprob: float, special: bool = False) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": logprob, "special": special}


def test_details_need_log_probabilities_and_show_no_others(info: ModelInfo) -> None:
    for body in ({"details": True}, {"parameters": {"details": True}}):
        request = _decode({"text_input": "x", **body}, info)
        assert request.reply.details and request.sampling.logprobs and not request.reply.logprobs
    assert _decode({"text_input": "x", "details": False}, info) == _decode({"text_input": "x"}, info)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "said"),
    [
        (FinishReason.LENGTH, None, "length"),
        (FinishReason.STOP, None, "eos_token"),
        (FinishReason.STOP, "!", "stop_sequence"),
        (FinishReason.STOP, 8, "stop_sequence"),
        (FinishReason.TIMEOUT, None, "timeout"),
    ],
)
def test_a_whole_reply_has_the_details_of_all_tokens(
    reason: FinishReason, stop_reason: int | str | None, said: str
) -> None:
    entries = (TokenLogprob(7, -0.5, token="hé".encode()), TokenLogprob(8, -1.0, token=b"</s>", special=True))
    event = TokenEvent(0, "hé", (7, 8), entries, finish_reason=reason, stop_reason=stop_reason)
    logprobs = [_detail(7, "hé", -0.5), _detail(8, "</s>", -1.0, special=True)]
    assert _unary(_DETAILED, event)["details"] == {"finish_reason": said, "logprobs": logprobs}


def test_of_several_sequences_each_has_its_details() -> None:
    two = replace(_DETAILED, sampling=SamplingParameters(n=2))
    events = [TokenEvent(index, finish_reason=FinishReason.LENGTH) for index in range(2)]
    assert _unary(two, *events)["details"] == [{"finish_reason": "length", "logprobs": []}] * 2


def test_with_details_a_stream_has_one_object_for_each_token() -> None:
    """The text is that of the event, as a token may be only a part of a character."""
    reply = FLAT.stream(_DETAILED, ReplyContext("model"))
    entries = (TokenLogprob(7, -0.5, token=b"\xc3"), TokenLogprob(8, -1.0, token=b"\xa9"))
    first, second = map(_read, reply.event(TokenEvent(0, "é", (7, 8), entries)))
    (last,) = map(_read, reply.event(TokenEvent(0, finish_reason=FinishReason.STOP, usage=Usage(4, 2))))
    assert first["details"] == {"finish_reason": None, "token": _detail(7, "\\xc3", -0.5)}
    assert second["details"] == {"finish_reason": None, "token": _detail(8, "\\xa9", -1.0)}
    assert [each["text_output"] for each in (first, second, last)] == ["", "é", ""]
    assert [each["chunk_index"] for each in (first, second, last)] == [0, 1, 2]
    assert last["details"] == {"finish_reason": "eos_token", "token": None} and last["triton_final_response"]


def test_a_failure_has_details_too() -> None:
    (body,) = FLAT.stream(_DETAILED, ReplyContext("model")).fail(RuntimeError("broken"))
    assert body["details"] == {"finish_reason": "error", "token": None} and body["error"] == "broken"
