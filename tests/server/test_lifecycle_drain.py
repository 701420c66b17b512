"""SIGTERM: not ready at once, streams in flight finish or end with ``abort``, and the process ends, for every door."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import psutil
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.inflight import Ending, flights, grpc_refusal, grpc_unary, rest_unary

SLOW = "decode:1:slow=0.02"  # 50 tokens a second at most
_HANGS_S = 30.0
LONG = {"max_tokens": 1000, "ignore_eos": True}


@contextmanager
def draining_server(tiny_model: Path, tmp_path: Path, delay: float, grace: float) -> Iterator[Server]:
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": SLOW,
        "MLSERVER_TORCH_STREAM_DRAIN_DELAY": str(delay),
        "MLSERVER_TORCH_STREAM_DRAIN_GRACE": str(grace),
    }
    models = [Model("tiny", str(tiny_model), extra={"max_num_seqs": 64})]
    with serve(tmp_path / "models", models, settings=QUIET, environment=environment) as server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float = _HANGS_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the bound"
        time.sleep(0.02)


def exit_code(server: Server) -> int:
    code = server.process.wait(_HANGS_S)
    return code


def get_ready(server: Server, path: str = "health") -> httpx.Response:
    return httpx.get(f"{server.url}/v2/{path}/ready", timeout=5)


def test_streams_finish_or_abort_and_newcomers_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with draining_server(tiny_model, tmp_path, 1.0, 3.0) as server, flights(server) as start:
        assert get_ready(server).status_code == 200
        family = psutil.Process(server.process.pid).children(recursive=True)
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
            wait_until(lambda: get_ready(server).status_code == 503, 5)
            assert get_ready(server).headers["retry-after"]
            assert get_ready(server, "models/tiny").status_code == 503
            assert not stub.ServerReady(pb.ServerReadyRequest()).ready
            assert not stub.ModelReady(pb.ModelReadyRequest(name="tiny")).ready
            assert httpx.get(f"{server.url}/v2/health/live", timeout=5).status_code == 200
            late = rest_unary(server, "tiny", max_tokens=2)
            assert late.code == 200, "requests are still taken while routers look away"

            refused: list[Ending] = []

            def refuses() -> bool:
                refused[:] = [rest_unary(server, "tiny", max_tokens=1)]
                return refused[0].code == 503

            wait_until(refuses, 5)
            assert refused[0].headers["retry-after"]
            assert grpc_refusal(stub, "tiny") is grpc.StatusCode.UNAVAILABLE
            assert grpc_unary(stub, "tiny", max_tokens=1).code is grpc.StatusCode.RESOURCE_EXHAUSTED

        assert [each.end().reason for each in short] == ["length"] * 2
        assert {each.end().reason for each in long} == {"abort"}
        assert idle_session.end().reason == "length"
        assert open_prompt.end().code is grpc.StatusCode.UNAVAILABLE, "it had no response yet"
        assert unary[0].end().code == 503
        assert unary[1].end().code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert exit_code(server) == 0, server.log
        assert "never retrieved" not in server.log and "Exception in ASGI" not in server.log
        assert not [process for process in family if process.is_running()]


def test_a_second_signal_cuts_the_grace_short(tiny_model: Path, tmp_path: Path) -> None:
    with draining_server(tiny_model, tmp_path, 600.0, 600.0) as server, flights(server) as start:
        stream = start.rest_stream("tiny", **LONG)
        server.process.send_signal(signal.SIGQUIT)
        wait_until(lambda: get_ready(server).status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert stream.end().reason == "abort"
        assert exit_code(server) == 0, server.log


def test_a_closed_terminal_ends_streams_as_sigterm_does(tiny_model: Path, tmp_path: Path) -> None:
    with draining_server(tiny_model, tmp_path, 0.0, 1.0) as server, flights(server) as start:
        stream = start.rest_stream("tiny", **LONG)
        server.process.send_signal(signal.SIGHUP)
        assert stream.end().reason == "abort"
        assert exit_code(server) == 0, server.log
