"""The status of each error: REST's, gRPC's on a unary call, gRPC's on a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub
from mlserver.grpc.utils import _grpc_status_code

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, QueueFull, RequestError
from mlserver_torch_stream.server.status import as_server_error, extend_grpc_codes
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server


@contextmanager
def queue_filled(slow: Server) -> Iterator[Stub]:
    """A long answer occupies the only row of ``narrow``, and another prompt the only place in its queue."""
    request = v2.grpc_request("narrow", "The quick brown fox ", max_tokens=900, ignore_eos=True)
    with grpc.insecure_channel(slow.grpc_target) as channel:
        stub = Stub(channel)
        calls = []
        try:
            for gauge in ("running_sequences", "waiting_requests"):
                calls.append(stub.ModelInfer.future(request))
                slow.wait_for("narrow", lambda now, gauge=gauge: now[gauge] == 1)
            yield stub
        finally:
            for call in calls:
                call.cancel()
            slow.wait_for("narrow", lambda now: now["running_sequences"] == now["waiting_requests"] == 0)


def test_a_full_queue_is_429_and_resource_exhausted(slow: Server) -> None:
    request = v2.grpc_request("narrow", "Hello", max_tokens=2)
    with queue_filled(slow) as stub:
        rest = plain_http.post(f"{slow.url}/v2/models/narrow/infer", json=v2.rest_body("Hello", max_tokens=2))
        with pytest.raises(grpc.RpcError) as unary:
            stub.ModelInfer(request, timeout=v2.TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as stream:
            list(stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S))
    assert rest.status_code == 429 and "waiting" in rest.json()["error"]
    assert unary.value.code() is stream.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert v2.rest_unary(slow.url, "/v2/models/narrow/infer", v2.rest_body("Hello", max_tokens=2)).final


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
