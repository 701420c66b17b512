"""The fields of a V2 request that concern its reply: streaming, outputs, flags, pieces."""

from __future__ import annotations

from typing import Any

import pytest
from mlserver.types import InferenceRequest
from mlserver.utils import insert_headers

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.v2_request import decode_piece, decode_request
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, ReplyOptions, StreamMode, TextPrompt, TokensPrompt
from tests.protocol.wire import T, Wire, over_rest, text


def decode(payload: InferenceRequest, info: ModelInfo, *, streaming: bool = False) -> GenerationRequest:
    return decode_request(payload, info, streaming=streaming, request_id="r1")


def refused(payload: InferenceRequest, info: ModelInfo, *, streaming: bool = False) -> str:
    with pytest.raises(InvalidInput) as caught:
        decode(payload, info, streaming=streaming)
    return caught.value.field


def flag(name: str, value: bool) -> T:
    return T(name, "BOOL", [value])


def test_a_unary_endpoint_refuses_to_stream_and_a_stream_endpoint_may_answer_once(wire: Wire, info: ModelInfo) -> None:
    asking, declining = wire(text("x"), flag("stream", True)), wire(text("x"), flag("stream", False))
    assert refused(asking, info) == "stream"
    assert decode(asking, info, streaming=True).stream is True
    assert decode(declining, info).stream is False
    assert decode(declining, info, streaming=True).stream is False
    assert decode(wire(text("x")), info, streaming=True).stream is None


def test_stream_inside_an_openai_body_counts_too(info: ModelInfo) -> None:
    payload = over_rest(text("x"), parameters={"llm_parameters": {"stream": True, "stream_options": {}}})
    assert refused(payload, info) == "stream"
    assert decode(payload, info, streaming=True).stream is True


def test_the_prompt_is_repeated_only_in_a_unary_reply(wire: Wire, info: ModelInfo) -> None:
    include = flag("exclude_input_in_output", False)
    assert decode(wire(text("x"), include), info).reply.echo_prompt
    assert not decode(wire(text("x"), flag("exclude_input_in_output", True)), info).reply.echo_prompt
    assert refused(wire(text("x"), include), info, streaming=True) == "exclude_input_in_output"
    assert decode(wire(text("x"), include, flag("stream", False)), info, streaming=True).reply.echo_prompt
    assert decode(wire(T("input_ids", "INT64", [1]), include), info).reply.echo_prompt
    assert decode(wire(text("x"), parameters={"echo": True}), info).reply.echo_prompt
    assert refused(wire(text("x"), include, parameters={"echo": False}), info) == "echo"
    assert refused(wire(text("x"), parameters={"echo": "true"}), info, streaming=True) == "echo"


def test_by_default_a_reply_says_why_it_ended_and_how_long_it_is(wire: Wire, info: ModelInfo) -> None:
    assert decode(wire(text("x")), info).reply == ReplyOptions()


@pytest.mark.parametrize(
    "name", ["finish_reason", "cumulative_logprob", "logprobs", "token_ids", "num_input_tokens", "num_output_tokens"]
)
def test_every_return_flag_decides_its_output(wire: Wire, info: ModelInfo, name: str) -> None:
    for value in (True, False):
        request = decode(wire(text("x"), flag(f"return_{name}", value)), info)
        assert getattr(request.reply, name) is value


def test_an_output_that_needs_logprobs_turns_them_on(wire: Wire, info: ModelInfo) -> None:
    for payload in (
        wire(text("x"), flag("return_logprobs", True)),
        wire(text("x"), flag("return_cumulative_logprob", True)),
        wire(text("x"), outputs=["cumulative_logprob"]),
    ):
        assert decode(payload, info).sampling.logprobs
    assert decode(wire(text("x"), parameters={"logprobs": 2}), info).reply.logprobs
    quiet = wire(text("x"), flag("return_logprobs", False), parameters={"logprobs": 2})
    assert not decode(quiet, info).reply.logprobs


def test_naming_an_output_asks_for_it_and_for_no_other(wire: Wire, info: ModelInfo) -> None:
    reply = decode(wire(text("x"), outputs=["token_ids"]), info).reply
    assert reply.token_ids
    assert reply.outputs == frozenset({"token_ids"})
    assert refused(wire(text("x"), outputs=["text_outputs"]), info) == "text_outputs"
    assert refused(wire(text("x"), outputs=["output_all"]), info) == "output_all"


def test_output_parameters_are_known_or_refused(info: ModelInfo) -> None:
    def payload(parameters: dict[str, Any]) -> InferenceRequest:
        inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]
        outputs = [{"name": "text_output", "parameters": parameters}]
        return InferenceRequest.model_validate({"inputs": inputs, "outputs": outputs})

    assert decode(payload({"binary_data": True, "content_type": "str"}), info).reply.outputs == frozenset(
        {"text_output"}
    )
    assert refused(payload({"classification": 3}), info) == "classification"


def test_stream_mode_is_each_unless_prompt(wire: Wire, info: ModelInfo) -> None:
    assert decode(wire(text("x")), info, streaming=True).stream_mode is StreamMode.EACH
    pieces = wire(text("x"), parameters={"stream_mode": "prompt"})
    assert decode(pieces, info, streaming=True).stream_mode is StreamMode.PROMPT
    assert refused(pieces, info) == "stream_mode"
    assert refused(wire(text("x"), parameters={"stream_mode": "session"}), info, streaming=True) == "stream_mode"


def test_only_one_text_or_ids_can_come_in_pieces(info: ModelInfo) -> None:
    mode = {"stream_mode": "prompt"}
    assert refused(over_rest(text("a", "b"), parameters=mode), info, streaming=True) == "stream_mode"
    chat = text('[{"role": "user", "content": "x"}]', name="messages")
    assert refused(over_rest(chat, parameters=mode), info, streaming=True) == "stream_mode"


def test_a_piece_continues_the_prompt_that_the_first_began(wire: Wire, info: ModelInfo) -> None:
    mode = {"stream_mode": "prompt", "max_tokens": 3}
    first = decode(wire(text("a"), parameters=mode), info, streaming=True)
    assert decode_piece(wire(text("b", name="prompt")), first, info) == TextPrompt("b")
    first = decode(wire(T("input_ids", "INT64", [1]), parameters=mode), info, streaming=True)
    assert decode_piece(wire(T("input_ids", "INT64", [2, 3])), first, info) == TokensPrompt((2, 3))


@pytest.mark.parametrize(
    ("tensors", "extra", "field"),
    [
        ([T("input_ids", "INT64", [2])], {}, "input_ids"),
        ([text("b"), T("max_tokens", "INT64", [2])], {}, "max_tokens"),
        ([text("b"), text("{}", name="sampling_parameters")], {}, "sampling_parameters"),
        ([text("b")], {"parameters": {"max_tokens": 2}}, "max_tokens"),
        ([text("b")], {"parameters": {"sampling_parameters": {"n": 2}}}, "sampling_parameters"),
        ([text("b")], {"outputs": ["text_output"]}, "outputs"),
        ([text("b", "c")], {}, "text_input"),
        ([text("")], {}, "text_input"),
        ([], {}, "text_input"),
    ],
)
def test_a_piece_is_nothing_but_a_piece(
    wire: Wire, info: ModelInfo, tensors: list[T], extra: dict[str, Any], field: str
) -> None:
    first = decode(wire(text("a"), parameters={"stream_mode": "prompt"}), info, streaming=True)
    with pytest.raises(InvalidInput) as caught:
        decode_piece(wire(*tensors, **extra), first, info)
    assert caught.value.field == field


def test_a_piece_may_carry_what_the_transport_adds(info: ModelInfo) -> None:
    first = decode(over_rest(text("a"), parameters={"stream_mode": "prompt"}), info, streaming=True)
    piece = over_rest(text("b"), parameters={"headers": {"a": "b"}, "content_type": "str", "binary_data_output": True})
    assert decode_piece(piece, first, info) == TextPrompt("b")


def test_priority_and_timeout_order_and_bound_a_request_and_0_asks_for_the_default(wire: Wire, info: ModelInfo) -> None:
    request = decode(wire(text("x"), parameters={"priority": 1, "timeout": 2_500_000}), info)
    assert (request.priority, request.timeout_s) == (1, 2.5)
    request = decode(wire(text("x"), parameters={"priority": 0, "timeout": 0}), info)
    assert (request.priority, request.timeout_s) == (None, None)
    assert refused(wire(text("x"), parameters={"timeout": -1}), info) == "timeout"
    assert refused(wire(text("x"), parameters={"priority": -1}), info) == "priority"


def test_a_header_says_whose_request_it_is(wire: Wire, info: ModelInfo) -> None:
    payload = wire(text("x"))
    assert decode(payload, info).client == ""
    assert decode(insert_headers(payload, {"X-Client-Id": "a team"}), info).client == "a team"
