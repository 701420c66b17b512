"""A client that pauses between the pieces of its prompt gets its error in time, without sending, and delays nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.server import v2
from tests.server.harness import Server

_PIECE = "The quick brown fox jumps over the lazy dog. " * 4


@contextmanager
def _paused(stub: Stub, model: str, **parameters: int) -> Iterator[tuple[grpc.Call, threading.Event]]:
    """A client that has sent one piece, and closes its side when the event is set."""
    whole = threading.Event()

    def pieces() -> Iterator[pb.ModelInferRequest]:
        yield v2.grpc_request(model, _PIECE, stream_mode="prompt", max_tokens=4, **parameters)
        whole.wait(v2.TIMEOUT_S)

    call = stub.ModelStreamInfer(pieces(), timeout=v2.TIMEOUT_S)
    try:
        yield call, whole
    finally:
        call.cancel()
        whole.set()


@pytest.mark.long
def test_a_client_that_sends_no_further_piece_is_told_without_having_to_send(impatient: Server) -> None:
    with grpc.insecure_channel(impatient.grpc_target) as channel, _paused(Stub(channel), "tiny") as (call, _):
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no further piece of the prompt arrived within 2 s" in caught.value.details()
    impatient.wait_for("tiny", lambda now: now["open_prompts"] == now["kv_cache_bytes"] == 0)


def test_a_time_limit_is_told_between_two_pieces(impatient: Server) -> None:
    before = impatient.counters("tiny")["timed_out_sequences"]
    with (
        grpc.insecure_channel(impatient.grpc_target) as channel,
        _paused(Stub(channel), "tiny", timeout=300_000) as (call, _),
        pytest.raises(grpc.RpcError) as caught,
    ):
        next(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "exceeded its timeout" in caught.value.details()
    assert impatient.counters("tiny")["timed_out_sequences"] == before + 1


def test_paused_clients_take_no_row_and_no_memory_from_others(server: Server, stub: Stub) -> None:
    with ExitStack() as stack:
        paused = [stack.enter_context(_paused(stub, "tight")) for _ in range(5)]
        server.wait_for("tight", lambda now: now["open_prompts"] == 5)
        body = v2.rest_body(_PIECE, max_tokens=4)
        other = v2.rest_unary(server.url, "/v2/models/tight/infer", body)
        assert other.final and server.counters("tight")["open_prompts"] == 5
        for _, whole in paused:
            whole.set()
        for call, _ in paused:
            replies = [v2.grpc_reply(each) for each in call]
            assert v2.joined(replies) == other.text and replies[-1].final
