"""Token events as V2 responses, read back through MLServer's own encoders."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from mlserver.grpc.converters import ModelMetadataResponseConverter
from mlserver.types import InferenceResponse, MetadataModelResponse

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.seldon_spelling import SELDON
from mlserver_torch_stream.protocol.spelling import ReplyContext
from mlserver_torch_stream.protocol.v2_reply import (
    StreamReply,
    UnaryReply,
    as_response,
    input_metadata,
    output_metadata,
)
from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import (
    FinishReason,
    GenerationRequest,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from tests.protocol.asked import asked
from tests.protocol.wire import grpc_message, rest_json, rest_outputs

REQUEST = asked("Say: ", request_id="r1")
EVERYTHING = asked("Say: ", request_id="r1", cumulative_logprob=True, logprobs=True, token_ids=True)
EVENTS = (
    TokenEvent(0, "hé", (7, 8), (TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.0))), TokenLogprob(8, -0.25)), -0.75),
    TokenEvent(0, " €", (9,), (TokenLogprob(9, -math.inf),), -1.5, FinishReason.STOP, Usage(4, 3, 0.0104, 0.25)),
)


def ended(index: int, text: str = "", tokens: int = 1, prompt: int = 4, ttft: float = 0.0) -> TokenEvent:
    usage = Usage(prompt, tokens, queue_s=ttft / 2, ttft_s=ttft)
    return TokenEvent(index, text, tuple(range(tokens)), finish_reason=FinishReason.LENGTH, usage=usage)


def streamed(request: GenerationRequest, *events: TokenEvent, **options: Any) -> list[dict[str, Any]]:
    reply = StreamReply(request, ReplyContext("model", **options))
    return [rest_json(encoded(reply, event)) for event in events]


def encoded(reply: StreamReply, event: TokenEvent) -> InferenceResponse:
    [body] = reply.event(event)
    return as_response(body)


def collected(request: GenerationRequest, *events: TokenEvent) -> UnaryReply:
    reply = UnaryReply(request, ReplyContext("model", "v1"))
    for event in events:
        reply.add(event)
    return reply


def grid(prompts: int, n: int, **reply: Any) -> GenerationRequest:
    texts = [f"p{position} " for position in range(prompts)]
    return asked(*texts, request_id="r1", sampling={"n": n}, **reply)


def test_a_delta_over_rest_is_exactly_this() -> None:
    assert streamed(REQUEST, EVENTS[0]) == [
        {
            "model_name": "model",
            "id": "r1",
            "parameters": {"request_id": "r1", "index": 0, "chunk_index": 0, "triton_final_response": False},
            "outputs": [{"name": "text_output", "shape": [1], "datatype": "BYTES", "data": ["hé"]}],
        }
    ]


def test_the_last_response_over_rest_says_why_and_how_much() -> None:
    last = streamed(REQUEST, *EVENTS)[-1]
    assert last["parameters"] == {
        "request_id": "r1",
        "index": 0,
        "chunk_index": 1,
        "triton_final_response": True,
        "usage_prompt_tokens": 4,
        "usage_completion_tokens": 3,
        "ttft_ms": 250,
        "queue_ms": 10,
    }
    assert {output["name"]: (output["datatype"], output["shape"], output["data"]) for output in last["outputs"]} == {
        "text_output": ("BYTES", [1], [" €"]),
        "finish_reason": ("BYTES", [1], ["stop"]),
        "num_input_tokens": ("UINT32", [1], [4]),
        "num_output_tokens": ("UINT32", [1], [3]),
    }


def test_grpc_loses_no_parameter_and_no_byte() -> None:
    reply = StreamReply(EVERYTHING, ReplyContext("model", "v1", request_index=2))
    encoded(reply, EVENTS[0])
    message = grpc_message(encoded(reply, EVENTS[1]))
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()
    }
    assert parameters == {
        "request_id": "r1",
        "request_index": 2,
        "index": 0,
        "chunk_index": 1,
        "triton_final_response": True,
        "usage_prompt_tokens": 4,
        "usage_completion_tokens": 3,
        "ttft_ms": 250,
        "queue_ms": 10,
    }
    outputs = {output.name: output.contents for output in message.outputs}
    assert (message.model_name, message.model_version, message.id) == ("model", "v1", "r1")
    assert list(outputs["text_output"].bytes_contents) == [" €".encode()]
    assert list(outputs["finish_reason"].bytes_contents) == [b"stop"]
    assert list(outputs["num_output_tokens"].uint_contents) == [3]
    assert list(outputs["token_ids"].int64_contents) == [9]
    assert list(outputs["cumulative_logprob"].fp64_contents) == [-1.5]
    [logprobs] = outputs["logprobs"].bytes_contents
    assert json.loads(logprobs) == [{"token_id": 9, "logprob": -9999.0, "top": []}]


def test_raw_grpc_carries_the_same_elements() -> None:
    reply = StreamReply(EVERYTHING, ReplyContext("model"))
    encoded(reply, EVENTS[0])
    message = grpc_message(encoded(reply, EVENTS[1]), raw=True)
    raw = dict(zip([output.name for output in message.outputs], message.raw_output_contents, strict=True))
    assert raw["text_output"] == struct.pack("<I", 4) + " €".encode()
    assert raw["num_input_tokens"] == struct.pack("<I", 4)
    assert raw["token_ids"] == struct.pack("<q", 9)
    assert raw["cumulative_logprob"] == struct.pack("<d", -1.5)
    unary = grpc_message(as_response(collected(EVERYTHING, *EVENTS).body()), raw=True)
    raw = dict(zip([output.name for output in unary.outputs], unary.raw_output_contents, strict=True))
    assert raw["token_ids"] == struct.pack("<3q", 7, 8, 9)


def test_what_was_not_asked_for_is_not_sent() -> None:
    quiet = asked(finish_reason=False, num_input_tokens=False, num_output_tokens=False)
    last = streamed(quiet, *EVENTS)[-1]
    assert [output["name"] for output in last["outputs"]] == ["text_output"]


def test_the_outputs_filter_leaves_the_parameters() -> None:
    only = asked(token_ids=True, outputs=frozenset({"token_ids"}))
    bodies = streamed(only, *EVENTS)
    assert [[output["name"] for output in body["outputs"]] for body in bodies] == [["token_ids"], ["token_ids"]]
    assert bodies[-1]["parameters"]["usage_completion_tokens"] == 3
    assert rest_outputs(as_response(collected(only, *EVENTS).body())) == {"token_ids": [7, 8, 9]}


def test_exactly_the_very_last_response_of_a_request_is_final() -> None:
    events = [ended(2, "c", 3), TokenEvent(0, "a"), ended(3), ended(0), TokenEvent(1, "b"), ended(1, tokens=5)]
    bodies = streamed(grid(2, 2), *events)
    assert [body["parameters"]["index"] for body in bodies] == [2, 0, 3, 0, 1, 1]
    assert [body["parameters"]["chunk_index"] for body in bodies] == [0, 1, 2, 3, 4, 5]
    assert [body["parameters"]["triton_final_response"] for body in bodies] == [False] * 5 + [True]
    assert ["usage_prompt_tokens" in body["parameters"] for body in bodies] == [False] * 5 + [True]
    finished = ["finish_reason" in {output["name"] for output in body["outputs"]} for body in bodies]
    assert finished == [True, False, True, True, False, True]


def test_usage_counts_each_prompt_once_and_every_sequence() -> None:
    events = [ended(0, tokens=1, prompt=4, ttft=0.2), ended(1, tokens=2, prompt=4, ttft=0.1),
              ended(2, tokens=3, prompt=6, ttft=0.4), ended(3, tokens=4, prompt=6, ttft=0.3)]  # fmt: skip
    parameters = streamed(grid(2, 2), *events)[-1]["parameters"]
    assert parameters["usage_prompt_tokens"] == 10
    assert parameters["usage_completion_tokens"] == 10
    assert (parameters["ttft_ms"], parameters["queue_ms"]) == (100, 50)


def test_a_request_that_fails_still_ends_exactly_once() -> None:
    reply = StreamReply(grid(1, 3), ReplyContext("model"))
    encoded(reply, ended(1))
    last = reply.fail(RuntimeError("broken"))
    assert [body["parameters"]["index"] for body in last] == [0, 2]
    assert [body["parameters"]["triton_final_response"] for body in last] == [False, True]
    assert all({"name": "finish_reason", "shape": [1], "datatype": "BYTES", "data": ["error"]} in body["outputs"]
               for body in last)  # fmt: skip
    assert reply.fail(RuntimeError("again")) == []


def test_only_the_final_response_has_an_error_beside_its_outputs() -> None:
    failed = TokenEvent(1, finish_reason=FinishReason.ERROR, error=RuntimeError("broken"))
    reply = StreamReply(grid(1, 2), ReplyContext("model"))
    [first], [last] = reply.event(failed), reply.event(ended(0, "x"))
    assert "error" not in first and first["parameters"]["error"] == "broken"
    assert last["error"] == "broken" and last["parameters"]["triton_final_response"] and last["outputs"]


def test_cloudevents_headers_stand_in_the_first_response_only() -> None:
    bodies = streamed(REQUEST, *EVENTS, headers={"Ce-Id": "r1"})
    assert [body["parameters"].get("headers") for body in bodies] == [{"Ce-Id": "r1"}, None]


def test_an_event_without_tokens_sends_no_empty_tensors() -> None:
    reply = StreamReply(EVERYTHING, ReplyContext("model"))
    names = {output["name"] for output in rest_json(encoded(reply, TokenEvent(0)))["outputs"]}
    assert names == {"text_output"}


def test_a_unary_reply_is_the_whole_stream_prompt_major() -> None:
    events = [TokenEvent(3, "d"), TokenEvent(0, "a"), ended(2, "c", 3, 6), ended(0, "A", 1), ended(1, "b", 2),
              ended(3, "D", 4, 6)]  # fmt: skip
    response = as_response(collected(grid(2, 2), *events).body())
    body = rest_json(response)
    assert rest_outputs(response) == {
        "text_output": ["aA", "b", "c", "dD"],
        "finish_reason": ["length"] * 4,
        "num_input_tokens": [4, 6],
        "num_output_tokens": [1, 2, 3, 4],
    }
    assert [output["shape"] for output in body["outputs"]] == [[4], [4], [2], [4]]
    assert body["model_version"] == "v1"
    assert body["parameters"]["triton_final_response"] is True
    assert (body["parameters"]["usage_prompt_tokens"], body["parameters"]["usage_completion_tokens"]) == (10, 10)


def test_join_of_the_deltas_is_the_unary_text() -> None:
    deltas = [body["outputs"][0]["data"][0] for body in streamed(REQUEST, *EVENTS)]
    assert "".join(deltas) == rest_outputs(as_response(collected(REQUEST, *EVENTS).body()))["text_output"][0] == "hé €"


def test_a_unary_reply_gathers_logprobs_and_ids() -> None:
    response = as_response(collected(EVERYTHING, *EVENTS).body())
    outputs = rest_outputs(response)
    assert outputs["token_ids"] == [7, 8, 9]
    assert outputs["cumulative_logprob"] == [-1.5]
    assert json.loads(outputs["logprobs"][0]) == [
        {"token_id": 7, "logprob": -0.5, "top": [[7, -0.5], [9, -1.0]]},
        {"token_id": 8, "logprob": -0.25, "top": []},
        {"token_id": 9, "logprob": -9999.0, "top": []},
    ]


def test_ids_of_several_sequences_are_one_rectangle() -> None:
    events = [ended(0, tokens=1), ended(1, tokens=3)]
    only = grid(1, 2, token_ids=True, outputs=frozenset({"token_ids"}))
    [output] = collected(only, *events).body()["outputs"]
    assert (output["shape"], output["data"]) == ([2, 3], [0, -1, -1, 0, 1, 2])


def test_an_echoed_prompt_stands_before_each_of_its_answers() -> None:
    request = grid(2, 2, echo_prompt=True)
    events = [replace(ended(index, str(index)), prompt_text=f"p{index // 2} ") for index in range(4)]
    response = as_response(collected(request, *events).body())
    assert rest_outputs(response)["text_output"] == ["p0 0", "p0 1", "p1 2", "p1 3"]


def test_a_unary_reply_before_its_end_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        collected(REQUEST, TokenEvent(0, "so far")).body()


def test_every_tensor_that_is_accepted_is_declared_once() -> None:
    spellings = []
    for tensor in input_metadata():
        aliases = tensor.parameters.model_extra["aliases"].split(",") if tensor.parameters else []
        spellings += [tensor.name, *aliases]
    assert sorted(spellings) == sorted(names.INPUT_TENSORS)


def test_every_output_of_a_reply_is_declared_with_its_datatype() -> None:
    reply = SELDON.whole(
        asked(cumulative_logprob=True, logprobs=True, token_ids=True, prompt_logprobs=True), ReplyContext("m")
    )
    end = TokenEvent(0, "y", (1,), finish_reason=FinishReason.STOP, usage=Usage(1, 1))
    reply.add(replace(end, reasoning="so", tool_calls=(ToolCallDelta(0, "c", "f", "{}"),)))
    sent = {output["name"]: output["datatype"] for output in reply.body()["outputs"]}
    assert sent == {tensor.name: tensor.datatype for tensor in output_metadata()}


def test_the_declaration_survives_grpc() -> None:
    metadata = MetadataModelResponse(name="m", platform="p", inputs=input_metadata(), outputs=output_metadata())
    message = ModelMetadataResponseConverter.from_types(metadata)
    assert [tensor.name for tensor in message.inputs] == [tensor.name for tensor in input_metadata()]
    assert message.inputs[0].parameters["aliases"].string_param.startswith("prompt,")
