"""Which status an error has: REST's, gRPC's on a unary call, gRPC's on a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub
from mlserver.grpc.utils import _grpc_status_code

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, QueueFull, RequestError
from mlserver_torch_stream.server.status import as_server_error, extend_grpc_codes
from tests.server import v2
from tests.server.harness import Server


@contextmanager
def queue_filled(server: Server, stub: Stub) -> Iterator[None]:
    """A prompt that waits for its second piece holds the only row of ``narrow``, another prompt its queue of one."""
    release = threading.Event()

    def pieces() -> Iterator[pb.ModelInferRequest]:
        yield v2.grpc_request("narrow", "The quick brown fox ", stream_mode="prompt", max_tokens=2)
        release.wait(v2.TIMEOUT_S)

    calls = [stub.ModelStreamInfer(pieces(), timeout=v2.TIMEOUT_S)]
    try:
        server.wait_for("narrow", lambda now: now["prefilling_jobs"] == 1)
        calls.append(stub.ModelStreamInfer(iter([v2.grpc_request("narrow", "x", max_tokens=2)]), timeout=v2.TIMEOUT_S))
        server.wait_for("narrow", lambda now: now["waiting_jobs"] == 1)
        yield
    finally:
        release.set()
        assert all(v2.grpc_reply(list(call)[-1]).final for call in calls)


def test_a_full_queue_is_429_and_resource_exhausted(server: Server, stub: Stub) -> None:
    request = v2.grpc_request("narrow", "Hello", max_tokens=2)
    with queue_filled(server, stub):
        rest = httpx.post(f"{server.url}/v2/models/narrow/infer", json=v2.rest_body("Hello", max_tokens=2))
        with pytest.raises(grpc.RpcError) as unary:
            stub.ModelInfer(request, timeout=v2.TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as stream:
            list(stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S))
    assert rest.status_code == 429 and "waiting" in rest.json()["error"]
    assert unary.value.code() is stream.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert v2.rest_unary(server.url, "/v2/models/narrow/infer", v2.rest_body("Hello", max_tokens=2)).final


@pytest.mark.parametrize(
    ("error", "unary", "stream"),
    [
        (InvalidInput("f", "m"), grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (QueueFull("m"), grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (NotServing("m"), grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE),
        (GenerationFailed("m"), grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
def test_every_error_has_a_grpc_code_and_keeps_its_rest_status(
    error: RequestError, unary: grpc.StatusCode, stream: grpc.StatusCode
) -> None:
    extend_grpc_codes()
    for streaming, code in ((False, unary), (True, stream)):
        served = as_server_error(error, streaming=streaming)
        assert _grpc_status_code(served) is code
        assert int(served.status_code) == error.status
