"""A reader that stalls: the engine finishes long before it, and a stalled stream is given up in time."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.reliability.calls import ENDPOINTS, TRITON_ENDPOINTS, Endpoint, ask, calling
from tests.reliability.conftest import QUIET
from tests.reliability.counts import idle, until
from tests.reliability.reciter import recital
from tests.reliability.usage import MIB, rss_of
from tests.reliability.wire import wired
from tests.server import raw, v2
from tests.server.harness import Model, Server, serve
from tests.waiting import wait_until

_STREAMS = [endpoint for endpoint in ENDPOINTS if endpoint.streams]
# A kilobyte and more per token: more than the sockets between the two take.
_HEAVY: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "return_logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize(
    "endpoint",
    [
        pytest.param(Endpoint.REST_STREAM, marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.slow) for each in _STREAMS[1:]),
    ],
)
def test_others_go_on_beside_a_reader_that_stalls(plain: Server, endpoint: Endpoint) -> None:
    before, memory = idle(plain, "recite"), rss_of(plain)
    with wired(plain) as (far, rest, grpc_wire), calling(endpoint, far, "recite", **_HEAVY) as stalled:
        stalled.read(1)
        (rest if endpoint.rest else grpc_wire).stop_reading()
        beside = ask(endpoint, plain, "recite", max_tokens=100)
        assert beside.texts == [recital(100)] * endpoint.requests
        generated = before["generation_tokens"] + endpoint.requests * (_HEAVY["max_tokens"] + 100)
        until(plain, "recite", lambda now: now["generation_tokens"] == generated)
        idle(plain, "recite")
        assert rss_of(plain) - memory < 64 * MIB
    # Its engine's part had ended well; that nobody read it is noticed when it leaves.
    until(plain, "recite", lambda now: now.requests("cancelled") + now.requests("length") > before.requests("length"))


@pytest.mark.long
def test_a_stalled_stream_is_cut(slow: Server) -> None:
    before = idle(slow, "recite")
    with wired(slow) as (far, rest, _), calling(Endpoint.REST_STREAM, far, "recite", **_HEAVY) as stalled:
        stalled.read(1)
        rest.stop_reading()
        until(slow, "recite", lambda now: now.requests("cancelled") - before.requests("cancelled") == 1, 60)
        after = idle(slow, "recite")
        assert after["generation_tokens"] - before["generation_tokens"] < _HEAVY["max_tokens"], "before its end"
        wait_until(lambda: "has read nothing" in slow.log, "the reason")


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", [Endpoint.GRPC_STREAM, Endpoint.GRPC_BIDI, *TRITON_ENDPOINTS])
def test_a_grpc_stream_that_nobody_takes_is_given_up(recite: Path, tmp_path: Path, endpoint: Endpoint) -> None:
    """gRPC buffers some megabytes before a writer has to wait.

    The client's machine works, and acknowledges all data.
    """
    environment = {"MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "1"}
    models = [Model("recite", str(recite))]
    with serve(tmp_path / "models", models, settings=QUIET, environment=environment, triton=True) as server:
        before = idle(server, "recite")
        with calling(endpoint, server, "recite", **{**_HEAVY, "n": 8, "max_tokens": 4000}) as stalled:
            stalled.read(1)
            until(server, "recite", lambda now: now.requests("cancelled") == endpoint.requests, 60)
            after = idle(server, "recite")
            assert after["generation_tokens"] - before["generation_tokens"] < endpoint.requests * 8 * 4000
            assert after["wasted_tokens"] == 0
            assert server.log.count("has read nothing") == 1
            result = stalled.end()
        assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED and "nothing was read for 1 s" in result.said


@pytest.mark.long
@pytest.mark.parametrize("endpoint", _STREAMS)
def test_a_slow_but_steady_reader_is_not_cut(slow: Server, endpoint: Endpoint) -> None:
    """The reader is slower than the stream, but always faster than the timeout."""
    begun = time.monotonic()
    with wired(slow) as (far, rest, grpc_wire), calling(endpoint, far, "recite", max_tokens=200) as call:
        wire = rest if endpoint.rest else grpc_wire
        for _ in range(6):
            wire.stop_reading()
            time.sleep(0.4)
            wire.read_on()
            call.read(1)
        result = call.end()
    assert time.monotonic() - begun > 2
    assert (result.reasons, result.texts) == (["length"] * endpoint.requests, [recital(200)] * endpoint.requests)


@pytest.mark.slow
def test_readers_that_stall_and_requests_that_are_not_whole_do_not_hold_up_the_end(
    recite: Path, tmp_path: Path
) -> None:
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.01", "MLSERVER_TORCH_STREAM_DRAIN_GRACE": "1"}
    with (
        serve(tmp_path / "models", [Model("recite", str(recite))], settings=QUIET, environment=environment) as server,
        wired(server) as (far, rest, grpc_wire),
        ExitStack() as stack,
    ):
        for path in ("/v2/models/recite/infer", "/v2/repository/index"):
            stack.enter_context(raw.connected(server)).sendall(raw.post(path, v2.rest_body("Hello"))[:-1])
        calls = [stack.enter_context(calling(endpoint, far, "recite", **_HEAVY)) for endpoint in _STREAMS]
        for call in calls:
            call.read(1)
        rest.stop_reading()
        grpc_wire.stop_reading()
        time.sleep(2)  # both directions fill
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert time.monotonic() - begun < 30  # grace and five seconds, and room for a busy machine
        assert "Traceback" not in server.log and "Cancel " not in server.log
