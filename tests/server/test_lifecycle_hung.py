"""A forward that does not return: clients get an error in time, health shows it, and the process ends.

The tests use every endpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests import plain_http
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, exit_code, get_ready, serve
from tests.server.inflight import flights
from tests.waiting import wait_until

_HUNG_S = 600.0  # longer than any bound here
_LEAD = 40  # decode steps, slow enough for all streams to begin before the one that hangs
LONG = {"max_tokens": 200, "ignore_eos": True}


@contextmanager
def hanging(tiny_model: Path, tmp_path: Path, grace: float = 1.0, **extra: Any) -> Iterator[Server]:
    """A server with a decode step of both models that does not return.

    The models share the cores, so that the other one only waits for them.
    """
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": f"decode:1:slow=0.05,decode:{_LEAD}:slow={_HUNG_S:.0f}",
        "MLSERVER_TORCH_STREAM_DRAIN_GRACE": str(grace),
    }
    models = [Model("hung", str(tiny_model), extra=extra), Model("other", str(tiny_model))]
    with serve(tmp_path / "models", models, settings=QUIET, environment=environment) as server:
        yield server


def get_live(server: Server) -> int:
    return plain_http.get(f"{server.url}/v2/health/live", timeout=5).status_code


def until_it_hangs(server: Server) -> None:
    """Waits until all steps before the one that hangs have been counted."""
    server.wait_for("hung", lambda now: now["decode_steps"] >= _LEAD - 1)


@pytest.mark.slow
def test_clients_are_told_in_time_and_sigterm_ends_the_process_within_the_grace(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The streams of ``other`` wait for the cores that the hung step occupies."""
    with hanging(tiny_model, tmp_path, request_timeout=6.0, max_num_seqs=2) as server, flights(server) as start:
        began = time.monotonic()
        held = [start.rest_stream("hung", **LONG), start.grpc_stream("hung", **LONG)]
        waiting = [start.rest_stream("other", **LONG), start.grpc_stream("other", **LONG)]
        unary = start.rest_unary("other", **LONG)
        until_it_hangs(server)
        behind = [start.rest_unary("hung", **LONG), start.grpc_unary("hung", **LONG)]
        assert [each.end().reason for each in held] == ["timeout"] * 2, "with the text so far"
        assert [each.end().code for each in behind] == [504, grpc.StatusCode.DEADLINE_EXCEEDED]
        assert time.monotonic() - began < 60
        wait_until(lambda: get_ready(server).status_code == 503)
        assert "has not returned for" in get_ready(server).json()["error"]
        assert get_ready(server, "models/hung").status_code == 503
        assert get_live(server) == 200, "it may still come back"
        assert server.process.poll() is None

        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert [each.end().reason for each in waiting] == ["abort"] * 2
        assert unary.end().code == 503
        assert exit_code(server) == 0, server.log
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_step_that_is_lost_ends_the_process_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    with (
        hanging(tiny_model, tmp_path, grace=2.0, step_timeout=3.0) as server,
        flights(server) as start,
        grpc.insecure_channel(server.grpc_target) as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        held = start.rest_stream("hung", **LONG)
        until_it_hangs(server)
        beside = start.rest_unary("other", **LONG)
        assert held.end().reason == "error"
        wait_until(lambda: get_live(server) == 503, seconds=10)
        assert not stub.ServerLive(pb.ServerLiveRequest()).live and get_ready(server).status_code == 503
        assert beside.end().code == 503, "it ends with the process, after the grace"
        assert exit_code(server) == 1, server.log
        line = "the engine of model 'hung' died: the decode step of 1 sequence has not returned for 3 s (step_timeout)"
        assert any(line in each and "Ending the process" in each for each in server.log.splitlines()), server.log
