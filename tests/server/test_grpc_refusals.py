"""Errors of clients over gRPC, and clients that leave, give a status and at most one line in the log, no traceback."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import uuid4

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.server import v2
from tests.server.harness import Server
from tests.waiting import wait_until

_PROMPT = "Hello fox"


@pytest.fixture
def server(impatient: Server) -> Server:
    """A server with no other tests' lines in its log, and so slow that clients can leave in mid-answer."""
    return impatient


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield Stub(channel)


def refusal(stub: Stub, streaming: bool, *requests: pb.ModelInferRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        if streaming:
            list(stub.ModelStreamInfer(iter(requests), timeout=v2.TIMEOUT_S))
        else:
            stub.ModelInfer(requests[0], timeout=v2.TIMEOUT_S)
    return caught.value


def _ends(responses: Iterable[pb.ModelInferResponse]) -> dict[Any, str]:
    """Returns how each request of a stream has ended, by its number."""
    ends = {}
    for reply in map(v2.grpc_reply, responses):
        if reply.final:
            error = reply.parameters.get("error")
            ends[reply.parameters["request_index"]] = f"error: {error}" if error else str(reply.finish_reason)
    return ends


class _Log:
    """The lines that a server writes from now on, without those about clients that have left before."""

    def __init__(self, server: Server) -> None:
        """Makes a request, whose line comes after those about earlier requests."""
        mark = f"mark-{uuid4().hex}"
        with grpc.insecure_channel(server.grpc_target) as channel:
            Stub(channel).ModelInfer(v2.grpc_request("tiny", _PROMPT, id=mark, max_tokens=1), timeout=v2.TIMEOUT_S)
        wait_until(lambda: f"request_id={mark} " in server.log, "the line of the mark")
        self._server = server
        self._begun = len(server.log)

    @property
    def lines(self) -> list[str]:
        lines = self._server.log[self._begun :].splitlines()
        return [line for line in lines if "client=disconnected" not in line]

    def settled(self, count: int) -> list[str]:
        """Waits until there are ``count`` lines, and a moment for more. Returns all of them."""
        end = time.monotonic() + 20
        while len(self.lines) < count and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)
        return self.lines


def test_a_stream_that_ends_before_its_first_message_is_invalid_argument(server: Server, stub: Stub) -> None:
    log = _Log(server)
    error = refusal(stub, True)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "inputs: the stream ended before its first message"
    (line,) = log.settled(1)
    assert " INFO " in line and "INVALID_ARGUMENT" in line


@pytest.mark.parametrize("streaming", [False, True])
def test_an_error_whose_text_is_too_long_for_metadata_is_cut(stub: Stub, streaming: bool) -> None:
    """Otherwise the client gets RESOURCE_EXHAUSTED instead."""
    error = refusal(stub, streaming, v2.grpc_request("ü" * 3000, _PROMPT))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details().startswith("Model üüü") and error.details().endswith("ü…")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_refusal_is_one_line_at_info(server: Server, stub: Stub, streaming: bool) -> None:
    log = _Log(server)
    error = refusal(stub, streaming, v2.grpc_request("tiny", _PROMPT, max_tokens=0))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "max_tokens" in str(error.details())
    (line,) = log.settled(1)
    assert " INFO " in line and "status=422" in line


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_model_is_one_line_at_info(server: Server, stub: Stub, streaming: bool) -> None:
    log = _Log(server)
    assert refusal(stub, streaming, v2.grpc_request("nobody", _PROMPT)).code() is grpc.StatusCode.NOT_FOUND
    (line,) = log.settled(1)
    assert " INFO " in line and "nobody" in line


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_version_is_one_line_at_info(server: Server, stub: Stub, streaming: bool) -> None:
    log = _Log(server)
    error = refusal(stub, streaming, v2.grpc_request("tiny", _PROMPT, version="v9"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    (line,) = log.settled(1)
    assert " INFO " in line and "v9" in line


def test_a_name_of_two_lines_is_one_line_in_the_log(server: Server, stub: Stub) -> None:
    log = _Log(server)
    refusal(stub, False, v2.grpc_request("nobody\n2026-01-01 ERROR - forged", _PROMPT))
    (line,) = log.settled(1)
    assert "forged" in line


def test_a_load_and_an_unload_of_an_unknown_model_are_one_line_each(server: Server, stub: Stub) -> None:
    log = _Log(server)
    for call, request in (
        (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="nobody")),
        (stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(model_name="nobody")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=v2.TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert [" INFO " in line and "nobody" in line for line in log.settled(2)] == [True, True]


def _raw_stream(server: Server, messages: list[bytes]) -> list[pb.ModelInferResponse]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        return [pb.ModelInferResponse.FromString(raw) for raw in call(iter(messages), timeout=v2.TIMEOUT_S)]


def test_bytes_that_are_no_message_are_refused_without_a_traceback(server: Server) -> None:
    log = _Log(server)
    with pytest.raises(grpc.RpcError) as caught:
        _raw_stream(server, [b"\xff\xff"])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (line,) = log.settled(1)
    assert " INFO " in line


_TO_TINY = pb.ModelInferRequest(model_name="tiny").SerializeToString()
_PARAMETERS = [b'"\x07\n\x05%05d' % number for number in range(5000)]


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        (b"*\0" * 100_000, "inputs"),
        (b"2\0" * 100_000, "outputs"),
        (b":\0" * 100_000, "raw_input_contents"),
        (b"".join(_PARAMETERS), "parameters"),
    ],
    ids=["inputs", "outputs", "raw contents", "parameters"],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_entries_of_a_message_are_counted_before_they_are_converted(
    server: Server, entries: bytes, field: str, streaming: bool
) -> None:
    with pytest.raises(grpc.RpcError) as caught, grpc.insecure_channel(server.grpc_target) as channel:
        if streaming:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            list(call(iter([_TO_TINY + entries]), timeout=v2.TIMEOUT_S))
        else:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(_TO_TINY + entries, timeout=v2.TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: must have at most ")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_strings_of_a_tensor_are_counted_before_they_are_converted(stub: Stub, streaming: bool, raw: bool) -> None:
    message = pb.ModelInferRequest(model_name="tiny")
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[200_000])
    if raw:
        message.raw_input_contents.append(bytes(4 * 200_000))
    else:
        tensor.contents.bytes_contents.extend([b""] * 200_000)
    error = refusal(stub, streaming, message)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("text_input: must have at most 131072 elements")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_large_message_is_answered_as_a_small_one(stub: Stub, streaming: bool) -> None:
    """A large message is converted in a thread."""
    errors = [refusal(stub, streaming, v2.grpc_request("tiny", "a " * count, raw=True)) for count in (5_000, 50_000)]
    assert {error.code() for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert all(error.details().startswith("text_input: ") and "tokens" in error.details() for error in errors)


def test_bytes_that_are_no_message_behind_one_leave_its_answer_alone(server: Server) -> None:
    log = _Log(server)
    first = v2.grpc_request("tiny", _PROMPT, max_tokens=3, ignore_eos=True).SerializeToString()
    reasons = _ends(_raw_stream(server, [first, b"\xff\xff"]))
    assert (reasons[0], reasons[1].startswith("error: inputs: ")) == ("length", True)
    assert not [line for line in log.settled(2) if "Traceback" in line]


def test_a_message_that_names_another_model_than_the_first_is_refused_alone(server: Server, stub: Stub) -> None:
    messages = [
        v2.grpc_request(name, _PROMPT, max_tokens=3, ignore_eos=True) for name in ("tiny", "nobody", "tiny", "")
    ]
    messages[2].model_version = "v9"
    reasons = _ends(list(stub.ModelStreamInfer(iter(messages), timeout=v2.TIMEOUT_S)))
    refused = "error: model_name: the name or the version differs from that of the stream's first message"
    assert reasons == {0: "length", 1: refused, 2: refused, 3: "length"}


def test_metadata_of_an_unknown_model_is_one_line_at_info(server: Server, stub: Stub) -> None:
    log = _Log(server)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelMetadata(pb.ModelMetadataRequest(name="nobody"), timeout=v2.TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    (line,) = log.settled(1)
    assert " INFO " in line


def test_clients_that_leave_leave_no_traceback(server: Server, stub: Stub) -> None:
    """Clients leave at different times: before the first response, between two, and with messages still to come."""
    log = _Log(server)
    for number in range(30):
        requests = [v2.grpc_request("tiny", _PROMPT, max_tokens=100, ignore_eos=True)] * (1 + number % 3)
        call = stub.ModelStreamInfer(iter(requests), timeout=v2.TIMEOUT_S)
        for _ in range(number % 4):
            next(call)
        call.cancel()
    server.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    # What nobody awaits is told of when it is collected: by a full collection of the server's.
    for _ in range(20):
        refusal(stub, False, v2.grpc_request("tiny", _PROMPT, max_tokens=0))
    lines = log.settled(20)
    assert not [line for line in lines if "Traceback" in line or "never retrieved" in line], "\n".join(lines)
