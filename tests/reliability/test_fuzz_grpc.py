"""Malformed messages over gRPC get INVALID_ARGUMENT with a reason, never an answer, and never end the server."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from mlserver_torch_stream.protocol.v2_names import INPUT_TENSORS, OUTPUT_DATATYPES
from tests.protocol.test_v2_fuzz import any_text, key
from tests.reliability.reciter import recital
from tests.server import triton_wire, v2
from tests.server.harness import Server

_SERVICE = "/inference.GRPCInferenceService/"
_FAST, _SLOW = 100, 2000
_REFUSED = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def channel(plain: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(plain.grpc_target) as open_channel:
        yield open_channel


@pytest.fixture(scope="module")
def triton(plain: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(plain.triton_target) as open_channel:
        yield open_channel


def _code(channel: grpc.Channel, request: pb.ModelInferRequest, streaming: bool) -> grpc.StatusCode:
    stub = Stub(channel)
    try:
        if streaming:
            replies = list(stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S))
            assert v2.grpc_reply(replies[-1]).final
        else:
            stub.ModelInfer(request, timeout=v2.TIMEOUT_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def _text(raw: bytes | None = None, **tensor: object) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="small")
    request.inputs.add(**{"name": "text_input", "datatype": "BYTES", "shape": [1], **tensor})
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def _ids(raw: bytes, datatype: str = "INT64", shape: tuple[int, ...] = (2,)) -> pb.ModelInferRequest:
    return _text(raw, name="input_ids", datatype=datatype, shape=list(shape))


def _more_raw_than_inputs() -> pb.ModelInferRequest:
    request = _text(b"\x01\0\0\0x")
    request.raw_input_contents.append(b"\x01\0\0\0y")
    return request


def _less_raw_than_inputs() -> pb.ModelInferRequest:
    request = _text(b"\x01\0\0\0x")
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    return request


def _both() -> pb.ModelInferRequest:
    request = v2.grpc_request("small", "Hello")
    request.raw_input_contents.append(b"\x01\0\0\0y")
    return request


_MALFORMED: dict[str, Callable[[], pb.ModelInferRequest]] = {
    "no inputs": lambda: pb.ModelInferRequest(model_name="small"),
    "no contents": lambda: _text(),
    "raw is empty": lambda: _text(b""),
    "raw has no length": lambda: _text(b"Hello"),
    "raw is shorter than its length": lambda: _text(b"\xff\0\0\0Hello"),
    "raw has a length of 4 GiB": lambda: _text(b"\xff\xff\xff\xffHello"),
    "raw is cut in a length": lambda: _text(b"\x01\0\0\0x\x05\0"),
    "raw has more elements than the shape": lambda: _text(b"\x01\0\0\0x\x01\0\0\0y"),
    "raw has fewer elements than the shape": lambda: _text(b"\x01\0\0\0x", shape=[2]),
    "raw is no UTF-8": lambda: _text(b"\x02\0\0\0\xff\xfe"),
    "raw ids of odd size": lambda: _ids(b"\x01" * 15),
    "raw ids fewer than the shape": lambda: _ids(b"\x01" + bytes(7)),
    "raw ids more than the shape": lambda: _ids(bytes(24)),
    "ids out of the vocabulary": lambda: _ids((10**9).to_bytes(8, "little") * 2),
    "negative ids": lambda: _ids(b"\xff" * 16),
    "more raw than inputs": _more_raw_than_inputs,
    "less raw than inputs": _less_raw_than_inputs,
    "raw and typed contents at once": _both,
    "an unknown datatype": lambda: _text(b"\x01\0\0\0x", datatype="TEXT"),
    "no datatype": lambda: _text(b"\x01\0\0\0x", datatype=""),
    "a negative shape": lambda: _text(b"\x01\0\0\0x", shape=[-1]),
    "a huge shape": lambda: _text(b"\x01\0\0\0x", shape=[2**62, 2**62]),
    "a shape of nothing": lambda: _text(b"", shape=[0]),
    "an unknown tensor": lambda: _text(b"\x01\0\0\0x", name="picture"),
    "a float datatype for text": lambda: _text(b"\0\0\0\0", datatype="FP32"),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("what", _MALFORMED)
def test_what_is_malformed_is_an_invalid_argument(channel: grpc.Channel, what: str, streaming: bool) -> None:
    assert _code(channel, _MALFORMED[what](), streaming) is _REFUSED


@pytest.mark.parametrize("what", _MALFORMED)
def test_what_is_malformed_is_one_error_on_tritons_port(triton: grpc.Channel, what: str) -> None:
    (refused,) = triton_wire.replies(triton, _MALFORMED[what]())
    assert refused.error and refused.final
    with pytest.raises(grpc.RpcError) as caught:
        triton_wire.infer(triton, _MALFORMED[what]())
    assert caught.value.code() is _REFUSED and caught.value.details() in refused.error


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", os.urandom(500)])
def test_bytes_that_are_no_message_fail_their_call_only(channel: grpc.Channel, garbage: bytes) -> None:
    """gRPC itself refuses them, with INTERNAL or by ending the call, before our code is called."""
    for call in (
        lambda: channel.unary_unary(f"{_SERVICE}ModelInfer")(garbage, timeout=v2.TIMEOUT_S),
        lambda: list(channel.stream_stream(f"{_SERVICE}ModelStreamInfer")(iter([garbage]), timeout=v2.TIMEOUT_S)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
        assert refused.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    reply = v2.grpc_reply(Stub(channel).ModelInfer(v2.grpc_request("recite", "Hello", max_tokens=5)))
    assert reply.text == recital(5)


# --- any message ---

_DATATYPES = ["BYTES", "INT64", "INT32", "FP32", "BOOL", "", "TEXT"]
_VALUES = st.one_of(
    st.booleans().map(lambda value: pb.InferParameter(bool_param=value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: pb.InferParameter(int64_param=value)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(
        lambda value: pb.InferParameter(string_param=value)
    ),
    # Triton's own kinds: a double and an unsigned integer.
    st.floats().map(lambda value: pb.InferParameter.FromString(b"\x21" + struct.pack("<d", value))),
    st.integers(0, 127).map(lambda value: pb.InferParameter.FromString(b"\x28" + bytes([value]))),
)


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


@st.composite
def messages(draw: st.DrawFn) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="small", id=_utf8(draw(any_text)))
    names = st.sampled_from(["text_input", "x", *sorted(INPUT_TENSORS)])
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(
            name=draw(names),
            datatype=draw(st.sampled_from(_DATATYPES)),
            shape=draw(st.just([1]) | st.lists(st.integers(-2, 3), max_size=3)),
        )
        tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=8), max_size=2)))
        tensor.contents.int64_contents.extend(draw(st.lists(st.integers(-5, 300), max_size=2)))
        tensor.contents.bool_contents.extend(draw(st.lists(st.booleans(), max_size=1)))
    request.raw_input_contents.extend(draw(st.just([]) | st.lists(st.binary(max_size=24), max_size=3)))
    for name in draw(st.just([]) | st.lists(st.sampled_from([*OUTPUT_DATATYPES, "x"]), max_size=3)):
        request.outputs.add(name=name)
    for name, value in draw(st.dictionaries(key | any_text.map(_utf8), _VALUES, max_size=3)).items():
        request.parameters[name].CopyFrom(value)
    return request


def _fuzz(server: Server, channel: grpc.Channel, examples: int) -> None:
    understood = {grpc.StatusCode.OK, _REFUSED, grpc.StatusCode.DEADLINE_EXCEEDED}

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(request=messages(), streaming=st.booleans())
    def answers(request: pb.ModelInferRequest, streaming: bool) -> None:
        assert _code(channel, request, streaming) in understood

    answers()
    assert server.process.poll() is None


def _fuzz_triton(channel: grpc.Channel, examples: int) -> None:
    """Any message, even arbitrary bytes, has one final reply."""
    good = v2.grpc_request("recite", "Hello", id="good", max_tokens=3)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(odd=messages() | st.binary(max_size=60))
    def answers(odd: pb.ModelInferRequest | bytes) -> None:
        finals = [each for each in triton_wire.replies(channel, odd, good) if each.final]
        assert sorted(each.reply.parameters["request_index"] for each in finals) == [0, 1]
        (end,) = (each for each in finals if each.reply.parameters["request_index"] == 1)
        assert end.reply.finish_reason == "length"
        assert all("internal server error" not in each.error for each in finals)

    answers()


@pytest.mark.long
def test_a_hundred_messages_of_tritons(triton: grpc.Channel) -> None:
    _fuzz_triton(triton, _FAST)


@pytest.mark.slow
def test_two_thousand_messages_of_tritons(triton: grpc.Channel) -> None:
    _fuzz_triton(triton, _SLOW)


def test_a_hundred_messages(plain: Server, channel: grpc.Channel) -> None:
    _fuzz(plain, channel, _FAST)


@pytest.mark.slow
def test_two_thousand_messages(plain: Server, channel: grpc.Channel) -> None:
    _fuzz(plain, channel, _SLOW)
