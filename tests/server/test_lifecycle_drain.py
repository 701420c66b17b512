"""SIGTERM: the server is not ready at once, streams in flight finish or end with ``abort``, and the process ends.

The tests use every endpoint.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests import plain_http
from tests.server import openai, triton_wire, v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, exit_code, get_ready, serve
from tests.server.inflight import Ending, flights, grpc_refusal, grpc_unary, rest_unary
from tests.waiting import alive, wait_until

SLOW = "decode:1:slow=0.02"  # 50 tokens a second at most
LONG = {"max_tokens": 1000, "ignore_eos": True}


@contextmanager
def draining_server(tiny_model: Path, tmp_path: Path, delay: float, grace: float) -> Iterator[Server]:
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": SLOW,
        "MLSERVER_TORCH_STREAM_DRAIN_DELAY": str(delay),
        "MLSERVER_TORCH_STREAM_DRAIN_GRACE": str(grace),
    }
    models = [Model("tiny", str(tiny_model), extra={"max_num_seqs": 64})]
    with serve(tmp_path / "models", models, settings=QUIET, environment=environment, triton=True) as server:
        yield server


@contextmanager
def idle_triton_stream(server: Server) -> Iterator[Any]:
    """Yields a stream on Triton's port whose only request has been answered, and which its client keeps open."""
    waiting: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
    with grpc.insecure_channel(server.triton_target) as channel:
        call = triton_wire.stream(channel, iter(waiting.get, None))
        waiting.put(v2.grpc_request("tiny", "Hello", max_tokens=2, ignore_eos=True))
        while not triton_wire.streamed(next(call)).final:
            pass
        yield call
        waiting.put(None)


@pytest.mark.long
def test_streams_finish_or_abort_and_newcomers_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with (
        draining_server(tiny_model, tmp_path, 3.0, 4.0) as server,
        flights(server) as start,
        idle_triton_stream(server) as idle_triton,
    ):
        assert get_ready(server).status_code == 200
        openai.whole(server, openai.CHAT, openai.talk(max_tokens=1))  # a process of its own renders the template
        family = [each.pid for each in psutil.Process(server.process.pid).children(recursive=True)]
        assert family
        short = [start.rest_stream("tiny", max_tokens=60, ignore_eos=True)]
        short += [start.grpc_stream("tiny", max_tokens=60, ignore_eos=True)]
        long = [start.rest_stream("tiny", **LONG) for _ in range(14)]
        long += [start.grpc_stream("tiny", **LONG) for _ in range(14)]
        long += [start.grpc_stream("tiny", linger=True, **LONG)]
        idle_session = start.grpc_stream("tiny", linger=True, max_tokens=2, ignore_eos=True)
        open_prompt = start.grpc_prompt("tiny", "Hello")
        unary = [start.rest_unary("tiny", **LONG), start.grpc_unary("tiny", **LONG)]
        server.wait_for("tiny", lambda now: now["running_sequences"] >= 31)

        with grpc.insecure_channel(server.grpc_target) as channel:
            stub = GRPCInferenceServiceStub(channel)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: get_ready(server).status_code == 503)
            late = rest_unary(server, "tiny", max_tokens=2)
            assert late.code == 200, "requests are still taken while routers look away"
            assert get_ready(server).headers["retry-after"]
            assert get_ready(server, "models/tiny").status_code == 503
            assert not stub.ServerReady(pb.ServerReadyRequest()).ready
            assert not stub.ModelReady(pb.ModelReadyRequest(name="tiny")).ready
            assert plain_http.get(f"{server.url}/v2/health/live", timeout=5).status_code == 200

            refused: list[Ending] = []

            def refuses() -> bool:
                refused[:] = [rest_unary(server, "tiny", max_tokens=1)]
                return refused[0].code == 503

            wait_until(refuses)
            assert refused[0].headers["retry-after"]
            assert grpc_refusal(stub, "tiny") is grpc.StatusCode.UNAVAILABLE
            assert grpc_unary(stub, "tiny", max_tokens=1).code is grpc.StatusCode.RESOURCE_EXHAUSTED

        assert [each.end().reason for each in short] == ["length"] * 2
        assert {each.end().reason for each in long} == {"abort"}
        assert idle_session.end().reason == "length"
        with pytest.raises(grpc.RpcError):
            next(idle_triton)
        assert idle_triton.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in idle_triton.details()
        assert open_prompt.end().code is grpc.StatusCode.UNAVAILABLE, "it had no response yet"
        assert unary[0].end().code == 503
        assert unary[1].end().code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert exit_code(server) == 0, server.log
        assert "never retrieved" not in server.log and "Exception in ASGI" not in server.log
        wait_until(lambda: not any(map(alive, family)), "the end of the server's processes")


def test_ctrl_c_closes_every_listener_as_sigterm_does(tiny_model: Path, tmp_path: Path) -> None:
    """uvicorn alone would end its other listener abruptly, and log the traceback of the interrupted shutdown."""
    with draining_server(tiny_model, tmp_path, 0.0, 5.0) as server:
        server.process.send_signal(signal.SIGINT)
        assert exit_code(server) == 0, server.log
        assert "Traceback" not in server.log
        assert (
            server.log.count("Application shutdown complete") == server.log.count("Application startup complete") == 2
        )


@pytest.mark.slow
def test_a_closed_terminal_drains_as_sigterm_does_and_a_second_signal_cuts_the_grace_short(
    tiny_model: Path, tmp_path: Path
) -> None:
    with draining_server(tiny_model, tmp_path, 600.0, 600.0) as server, flights(server) as start:
        stream = start.rest_stream("tiny", **LONG)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: get_ready(server).status_code == 503)
        assert rest_unary(server, "tiny", max_tokens=1).code == 200
        server.process.send_signal(signal.SIGINT)
        assert stream.end().reason == "abort"
        assert exit_code(server) == 0, server.log
