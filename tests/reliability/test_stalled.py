"""A reader that stalls: the engine is done with it long before it is, and a stalled stream is given up in time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.reliability.calls import DOORS, Door, ask, calling
from tests.reliability.counts import idle, until
from tests.reliability.reciter import recital
from tests.reliability.usage import MIB, rss_of
from tests.reliability.wire import wired
from tests.server.harness import Server

_STREAMS = [door for door in DOORS if door.streams]
# A kilobyte and more per token: more than the sockets between the two take.
_HEAVY: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "return_logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize("door", _STREAMS)
def test_others_go_on_beside_a_reader_that_stalls(plain: Server, door: Door) -> None:
    before, memory = idle(plain, "recite"), rss_of(plain)
    with wired(plain) as (far, rest, grpc_wire), calling(door, far, "recite", **_HEAVY) as stalled:
        stalled.read(1)
        (rest if door.rest else grpc_wire).stop_reading()
        beside = ask(door, plain, "recite", max_tokens=100)
        assert beside.texts == [recital(100)] * door.requests
        generated = before["generated_tokens"] + door.requests * (_HEAVY["max_tokens"] + 100)
        until(plain, "recite", lambda now: now["generated_tokens"] == generated)
        idle(plain, "recite")
        assert rss_of(plain) - memory < 64 * MIB
    # Its engine's part had ended well; that nobody read it is noticed when it leaves.
    until(plain, "recite", lambda now: now.requests("cancelled") + now.requests("length") > before.requests("length"))


def test_a_stalled_stream_is_cut(slow: Server) -> None:
    before = idle(slow, "recite")
    with wired(slow) as (far, rest, _), calling(Door.REST_STREAM, far, "recite", **_HEAVY) as stalled:
        stalled.read(1)
        rest.stop_reading()
        until(slow, "recite", lambda now: now.requests("cancelled") - before.requests("cancelled") == 1, 60)
        after = idle(slow, "recite")
        assert after["generated_tokens"] - before["generated_tokens"] < _HEAVY["max_tokens"], "before its end"
        assert "has read nothing" in slow.log


def test_a_slow_but_steady_reader_is_not_cut(slow: Server) -> None:
    """Slower than the stream, never as slow as the bound."""
    begun = time.monotonic()
    with wired(slow) as (far, rest, _), calling(Door.REST_STREAM, far, "recite", max_tokens=200) as call:
        for _ in range(6):
            rest.stop_reading()
            time.sleep(0.4)
            rest.read_on()
            call.read(1)
        result = call.end()
    assert time.monotonic() - begun > 2
    assert (result.reasons, result.text) == (["length"], recital(200))
