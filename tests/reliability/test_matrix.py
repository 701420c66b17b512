"""Triton's eighteen cells: unary, stream and bidirectional, each ended in six ways, over REST where there is REST."""

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

from tests.reliability.calls import BOUND_S, DOORS, Door, Result, ask, calling
from tests.reliability.conftest import QUIET
from tests.reliability.counts import Counts, counts, idle, until
from tests.reliability.reciter import LOOP, recital
from tests.reliability.wire import wired
from tests.server.harness import Model, Server, serve

each_door = pytest.mark.parametrize("door", DOORS)
_ENOUGH = 3 * LOOP
_LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
_TIME_S = 1.0
_FAULTY_STEP = 30


def one_more(server: Server, model: str, reason: str, before: Counts, count: int) -> Counts:
    """The figures when so many more requests have ended for this reason, and nothing is held."""
    until(server, model, lambda now: now.requests(reason) - before.requests(reason) == count)
    return idle(server, model)


# --- ok ---


@each_door
def test_ok(plain: Server, door: Door) -> None:
    before = counts(plain, "recite")
    result = ask(door, plain, "recite", max_tokens=_ENOUGH)
    assert result.code is None
    assert result.texts == [recital(_ENOUGH)] * door.requests
    assert result.reasons == ["length"] * door.requests
    one_more(plain, "recite", "length", before, door.requests)


# --- cancel ---


@each_door
def test_cancel(slow: Server, door: Door) -> None:
    before = idle(slow, "recite")
    with calling(door, slow, "recite", **_LONG) as call:
        until(slow, "recite", lambda now: now["running_sequences"] == door.requests)
        call.leave()
        after = one_more(slow, "recite", "cancelled", before, door.requests)
        if not door.rest:
            assert call.end().code is grpc.StatusCode.CANCELLED
    assert after["cancelled_sequences"] - before["cancelled_sequences"] == door.requests
    assert after["wasted_tokens"] == before["wasted_tokens"]


# --- timeout ---


@each_door
def test_timeout(slow: Server, door: Door) -> None:
    before = counts(slow, "recite")
    result = ask(door, slow, "recite", timeout=int(_TIME_S * 1e6), **_LONG)
    if door.streams:
        assert result.code is None
        assert result.reasons == ["timeout"] * door.requests
        assert all(_is_part(text) for text in result.texts)
    else:
        assert result.code == (504 if door.rest else grpc.StatusCode.DEADLINE_EXCEEDED)
        assert "took too long" in result.said
    after = one_more(slow, "recite", "timeout", before, door.requests)
    assert after["timed_out_sequences"] - before["timed_out_sequences"] == door.requests


def _is_part(text: str) -> bool:
    return bool(text) and recital(2000).startswith(text.rstrip("�"))


# --- error ---


@pytest.fixture(scope="module")
def faulty(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One model, and one engine, for each door: its thirtieth decode step fails."""
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": f"decode:{_FAULTY_STEP}:raise,decode:1:slow=0.01"}
    models = [Model(door.value, str(recite)) for door in DOORS]
    folder = tmp_path_factory.mktemp("faulty") / "models"
    with serve(folder, models, settings=QUIET, environment=environment) as running:
        yield running


@each_door
def test_error(faulty: Server, door: Door) -> None:
    before = counts(faulty, door.value)
    result = ask(door, faulty, door.value, **_LONG)
    if door.streams:
        assert result.code is None
        assert result.reasons == ["error"] * door.requests
        assert all(_is_part(text) for text in result.texts)
    else:
        assert result.code == (500 if door.rest else grpc.StatusCode.INTERNAL)
        assert "RuntimeError" in result.said
    if door is Door.REST_STREAM:
        *well, last = result.events
        assert "RuntimeError" in last["error"] and not any("error" in event for event in well)
    after = one_more(faulty, door.value, "error", before, door.requests)
    assert after.errors(500) == door.requests
    assert ask(door, faulty, door.value, max_tokens=_ENOUGH).texts == [recital(_ENOUGH)] * door.requests


# --- shutdown ---


@dataclass(frozen=True)
class Shutdown:
    results: dict[Door, Result]
    exit_code: int
    log: str


@pytest.fixture(scope="module")
def shutdown(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Shutdown:
    """What came of a request through each door when the server was told to end under all of them."""
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.01",
        "MLSERVER_TORCH_STREAM_DRAIN_GRACE": "0.5",
    }
    folder = tmp_path_factory.mktemp("shutdown") / "models"
    models = [Model("recite", str(recite))]
    with serve(folder, models, settings=QUIET, environment=environment) as server, ExitStack() as stack:
        calls = {door: stack.enter_context(calling(door, server, "recite", **_LONG)) for door in DOORS}
        until(server, "recite", lambda now: now["running_sequences"] == sum(door.requests for door in DOORS))
        server.process.send_signal(signal.SIGTERM)
        results = {door: call.end() for door, call in calls.items()}
        return Shutdown(results, server.process.wait(BOUND_S), server.log)


@each_door
def test_shutdown(shutdown: Shutdown, door: Door) -> None:
    result = shutdown.results[door]
    if door.streams:
        assert result.code is None
        assert result.reasons == ["abort"] * door.requests
        assert all(_is_part(text) for text in result.texts)
    else:
        assert result.code == (503 if door.rest else grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "shutting down" in result.said
    assert shutdown.exit_code == 0 and "never retrieved" not in shutdown.log


# --- slow reader ---


@each_door
def test_slow_reader(plain: Server, door: Door) -> None:
    """The engine does not wait for a reader that pauses, and the reader misses nothing."""
    before = counts(plain, "recite")
    with (
        wired(plain) as (far, rest, grpc_wire),
        calling(door, far, "recite", return_logprobs=True, top_logprobs=5, **_LONG) as call,
    ):
        wire = rest if door.rest else grpc_wire
        if door.streams:
            call.read(1)
        else:
            until(plain, "recite", lambda now: now["running_sequences"] == 1)
        wire.stop_reading()
        wanted = before["generation_tokens"] + door.requests * _LONG["max_tokens"]
        until(plain, "recite", lambda now: now["generation_tokens"] == wanted)
        idle(plain, "recite")
        time.sleep(0.2)  # a pause after its end too
        wire.read_on()
        result = call.end()
    assert result.texts == [recital(_LONG["max_tokens"])] * door.requests
    assert result.reasons == ["length"] * door.requests
    one_more(plain, "recite", "length", before, door.requests)
