"""A client that leaves: its row and its cache are free before the second decode step after the server has seen it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import islice

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from mlserver_torch_stream import client
from tests.server import v2
from tests.server.harness import Server

_TOKENS = 1000


def _leave_rest(server: Server) -> int:
    with closing(client.stream(server.url, "tiny", "Hello", max_tokens=_TOKENS, ignore_eos=True)) as deltas:
        assert len(list(islice(deltas, 3))) == 3
    return 1


def _leave_grpc(server: Server) -> int:
    return _leave_grpc_after(server, 1)


def _leave_grpc_with_four_running(server: Server) -> int:
    return _leave_grpc_after(server, 4)


def _leave_grpc_after(server: Server, messages: int) -> int:
    request = v2.grpc_request("tiny", "Hello", max_tokens=_TOKENS, ignore_eos=True)
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = Stub(channel).ModelStreamInfer(iter([request] * messages), timeout=v2.TIMEOUT_S)
        seen: set[object] = set()
        while len(seen) < messages:
            seen.add(v2.grpc_reply(next(call)).parameters["request_index"])
        call.cancel()
    return messages


def _leave_grpc_unary(server: Server) -> int:
    request = v2.grpc_request("tiny", "Hello", max_tokens=_TOKENS, ignore_eos=True)
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = Stub(channel).ModelInfer.future(request, timeout=v2.TIMEOUT_S)
        server.wait_for("tiny", lambda now: now["running_sequences"] == 1)
        call.cancel()
    return 1


@pytest.mark.parametrize("leave", [_leave_rest, _leave_grpc, _leave_grpc_with_four_running, _leave_grpc_unary])
def test_leaving_frees_rows_and_cache_within_two_steps(server: Server, leave: Callable[[Server], int]) -> None:
    before = server.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    sequences = leave(server)
    after = server.wait_for("tiny", lambda now: now["cancelled_sequences"] - before["cancelled_sequences"] == sequences)
    assert after["running_sequences"] == 0 and after["kv_cache_bytes"] == before["kv_cache_bytes"]
    assert after["wasted_tokens"] - before["wasted_tokens"] <= sequences
    assert after["generation_tokens"] - before["generation_tokens"] < sequences * _TOKENS


def test_one_who_leaves_disturbs_nobody(server: Server) -> None:
    body = v2.rest_body("Hello fox", max_tokens=400, ignore_eos=True)
    alone = v2.rest_unary(server.url, "/v2/models/tiny/infer", body).text
    staying = client.stream(server.url, "tiny", "Hello fox", max_tokens=400, ignore_eos=True)
    texts = [next(staying).text]
    _leave_rest(server)
    _leave_grpc(server)
    assert "".join([*texts, *map(str, staying)]) == alone
