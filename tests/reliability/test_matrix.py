"""Eighteen cells for Triton: unary, stream and bidirectional, each ended in six ways; over REST, too, if it has them.

This file tests a client that leaves, for every endpoint; ``test_killed`` breaks the connection at chosen tokens.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.reliability.calls import BOUND_S, ENDPOINTS, TRITON_ENDPOINTS, Endpoint, Result, ask, calling
from tests.reliability.conftest import QUIET
from tests.reliability.counts import Counts, counts, idle, until
from tests.reliability.reciter import LOOP, recital
from tests.reliability.wire import wired
from tests.server.harness import Model, Server, serve
from tests.server.scrape import on_metrics_port

_ALL_ENDPOINTS = [*ENDPOINTS, *TRITON_ENDPOINTS]
each_endpoint = pytest.mark.parametrize(
    "endpoint", [*ENDPOINTS, *(pytest.param(endpoint, marks=pytest.mark.slow) for endpoint in TRITON_ENDPOINTS)]
)
_ENOUGH = 3 * LOOP
_LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
_TIME_S = 1.0
_FAULTY_STEP = 30


def one_more(server: Server, model: str, reason: str, before: Counts, count: int) -> Counts:
    """Waits until ``count`` more requests have ended for this reason and nothing is held. Returns the figures."""
    until(server, model, lambda now: now.requests(reason) - before.requests(reason) == count)
    return idle(server, model)


# --- ok ---


@each_endpoint
def test_ok(plain: Server, endpoint: Endpoint) -> None:
    before = counts(plain, "recite")
    result = ask(endpoint, plain, "recite", max_tokens=_ENOUGH)
    assert result.code is None
    assert result.texts == [recital(_ENOUGH)] * endpoint.requests
    assert result.reasons == ["length"] * endpoint.requests
    one_more(plain, "recite", "length", before, endpoint.requests)


# --- cancel ---


@pytest.mark.long
@pytest.mark.parametrize("endpoint", Endpoint)
def test_cancel(slow: Server, endpoint: Endpoint) -> None:
    """MLServer's own counters count it neither as a success nor as a failure."""
    before, answered = idle(slow, "recite"), _answered(slow)
    with calling(endpoint, slow, "recite", **_LONG) as call:
        until(slow, "recite", lambda now: now["running_sequences"] == endpoint.requests)
        call.leave()
        after = one_more(slow, "recite", "cancelled", before, endpoint.requests)
        if not endpoint.rest:
            assert call.end().code is grpc.StatusCode.CANCELLED
    assert after["cancelled_sequences"] - before["cancelled_sequences"] == endpoint.requests
    assert after["generation_tokens"] - before["generation_tokens"] < endpoint.requests * _LONG["max_tokens"]
    assert after["wasted_tokens"] == before["wasted_tokens"]
    assert not endpoint.rest or _answered(slow) == answered


def _answered(server: Server) -> list[dict[str, float]]:
    scrape = on_metrics_port(server)
    return [scrape.by("model", f"model_infer_request_{how}_total") for how in ("success", "failure")]


# --- timeout ---


@pytest.mark.long
@each_endpoint
def test_timeout(slow: Server, endpoint: Endpoint) -> None:
    before = counts(slow, "recite")
    result = ask(endpoint, slow, "recite", timeout=int(_TIME_S * 1e6), **_LONG)
    if endpoint.streams:
        assert result.code is None
        assert result.reasons == ["timeout"] * endpoint.requests
        assert all(_is_part(text) for text in result.texts)
    else:
        assert result.code == (504 if endpoint.rest else grpc.StatusCode.DEADLINE_EXCEEDED)
        assert "exceeded its timeout" in result.said
    after = one_more(slow, "recite", "timeout", before, endpoint.requests)
    assert after["timed_out_sequences"] - before["timed_out_sequences"] == endpoint.requests


def _is_part(text: str) -> bool:
    return bool(text) and recital(2000).startswith(text.rstrip("�"))


# --- error ---


@pytest.fixture(scope="module")
def faulty_servers(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Server]]:
    """Yields a server for each number of requests that share a step; each endpoint has its own model there.

    The model's thirtieth decode step fails, and so do the retries of its halves, down to each request alone.
    """
    found = {}
    with ExitStack() as stack:
        for count in {endpoint.requests for endpoint in _ALL_ENDPOINTS}:
            calls = range(_FAULTY_STEP, _FAULTY_STEP + 2 * count - 1)
            faults = [*(f"decode:{call}:raise" for call in calls), "decode:1:slow=0.01"]
            environment = {"MLSERVER_TORCH_STREAM_FAULTS": ",".join(faults)}
            models = [Model(each.value, str(recite)) for each in _ALL_ENDPOINTS if each.requests == count]
            folder = tmp_path_factory.mktemp("faulty") / "models"
            serving = serve(folder, models, settings=QUIET, environment=environment, triton=True)
            found[count] = stack.enter_context(serving)
        yield found


@pytest.mark.long
@each_endpoint
def test_error(faulty_servers: dict[int, Server], endpoint: Endpoint) -> None:
    faulty = faulty_servers[endpoint.requests]
    before = counts(faulty, endpoint.value)
    result = ask(endpoint, faulty, endpoint.value, **_LONG)
    if endpoint.streams:
        assert result.code is None
        assert result.reasons == ["error"] * endpoint.requests
        assert all(_is_part(text) for text in result.texts)
    else:
        assert result.code == (500 if endpoint.rest else grpc.StatusCode.INTERNAL)
        assert "RuntimeError" in result.said
    if endpoint in TRITON_ENDPOINTS:
        assert result.said.startswith("[request id: <id_unknown>] ") and "RuntimeError" in result.said
    if endpoint is Endpoint.REST_STREAM:
        *well, last = result.events
        assert "RuntimeError" in last["error"] and not any("error" in event for event in well)
    after = one_more(faulty, endpoint.value, "error", before, endpoint.requests)
    assert after.errors(500) == endpoint.requests
    assert ask(endpoint, faulty, endpoint.value, max_tokens=_ENOUGH).texts == [recital(_ENOUGH)] * endpoint.requests


# --- shutdown ---


@dataclass(frozen=True)
class Shutdown:
    results: dict[Endpoint, Result]
    exit_code: int
    log: str


@pytest.fixture(scope="module")
def shutdown(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Shutdown:
    """How a request through each endpoint ended when the server was told to stop during all of them."""
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.01",
        "MLSERVER_TORCH_STREAM_DRAIN_GRACE": "0.5",
    }
    folder = tmp_path_factory.mktemp("shutdown") / "models"
    models = [Model("recite", str(recite))]
    with ExitStack() as stack:
        server = stack.enter_context(serve(folder, models, settings=QUIET, environment=environment, triton=True))
        calls = {
            endpoint: stack.enter_context(calling(endpoint, server, "recite", **_LONG)) for endpoint in _ALL_ENDPOINTS
        }
        until(
            server,
            "recite",
            lambda now: now["running_sequences"] == sum(endpoint.requests for endpoint in _ALL_ENDPOINTS),
        )
        server.process.send_signal(signal.SIGTERM)
        results = {endpoint: call.end() for endpoint, call in calls.items()}
        return Shutdown(results, server.process.wait(BOUND_S), server.log)


@pytest.mark.parametrize("endpoint", _ALL_ENDPOINTS)
def test_shutdown(shutdown: Shutdown, endpoint: Endpoint) -> None:
    result = shutdown.results[endpoint]
    if (
        endpoint is Endpoint.TRITON_BIDI
    ):  # its client is told that the stream takes no more requests, unless it has closed it
        assert result.code in (None, grpc.StatusCode.UNAVAILABLE)
    elif endpoint.streams:
        assert result.code is None
    if endpoint.streams:
        assert result.reasons == ["abort"] * endpoint.requests
        assert all(_is_part(text) for text in result.texts)
    else:
        assert result.code == (503 if endpoint.rest else grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "shutting down" in result.said
    assert shutdown.exit_code == 0 and "never retrieved" not in shutdown.log


# --- slow reader ---


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint.REST_STREAM,
        pytest.param(Endpoint.GRPC_STREAM, marks=pytest.mark.long),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ENDPOINTS
            if each not in (Endpoint.REST_STREAM, Endpoint.GRPC_STREAM)
        ),
    ],
)
def test_slow_reader(plain: Server, endpoint: Endpoint) -> None:
    """The engine does not wait for a reader that pauses, and the reader gets everything."""
    before = counts(plain, "recite")
    with (
        wired(plain) as (far, rest, grpc_wire),
        calling(endpoint, far, "recite", return_logprobs=True, top_logprobs=5, **_LONG) as call,
    ):
        wire = rest if endpoint.rest else grpc_wire
        if endpoint.streams:
            call.read(1)
        else:
            until(plain, "recite", lambda now: now["running_sequences"] == 1)
        wire.stop_reading()
        wanted = before["generation_tokens"] + endpoint.requests * _LONG["max_tokens"]
        until(plain, "recite", lambda now: now["generation_tokens"] == wanted)
        idle(plain, "recite")
        time.sleep(0.2)  # a pause after its end too
        wire.read_on()
        result = call.end()
    assert result.texts == [recital(_LONG["max_tokens"])] * endpoint.requests
    assert result.reasons == ["length"] * endpoint.requests
    one_more(plain, "recite", "length", before, endpoint.requests)
