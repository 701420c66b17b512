"""A reader is given up only if it has an item and asks for no other one, only once, and never after the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import pytest

from mlserver_torch_stream.errors import TimedOut
from mlserver_torch_stream.server.grpc.streams import ReadTimeout
from mlserver_torch_stream.server.rest.sse import ChunkStream

_PATIENCE_S = 0.05


async def _items(count: int, every_s: float = 0.0) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(every_s)
        yield number


def _read(seconds: float, pauses: list[float], *, every_s: float = 0.0, closed: bool = False) -> tuple[list[int], int]:
    """Returns what a reader gets that pauses after each item, and how often it was given up."""
    given_up = []

    async def read() -> list[int]:
        def give_up() -> None:
            given_up.append(1)
            unread.close()

        unread = ReadTimeout(_items(len(pauses), every_s), seconds, give_up)
        got = []
        for pause in pauses:
            got.append(await anext(unread))
            if closed:
                unread.close()
            await asyncio.sleep(pause)
        return got

    return asyncio.run(asyncio.wait_for(read(), 30)), len(given_up)


def test_a_reader_that_asks_again_is_never_given_up() -> None:
    assert _read(100 * _PATIENCE_S, [0.0] * 300) == (list(range(300)), 0)


@pytest.mark.long
def test_items_that_are_late_are_not_the_readers_fault() -> None:
    assert _read(10 * _PATIENCE_S, [0.0] * 2, every_s=15 * _PATIENCE_S) == ([0, 1], 0)


def test_a_reader_that_stalls_is_given_up_once_and_told_if_it_comes_back() -> None:
    with pytest.raises(TimedOut, match=r"nothing was read for 0\.05 s"):
        _read(_PATIENCE_S, [0.0, 6 * _PATIENCE_S, 0.0])
    assert _read(_PATIENCE_S, [0.0, 6 * _PATIENCE_S]) == ([0, 1], 1)


@pytest.mark.parametrize(("seconds", "closed"), [(0.0, False), (_PATIENCE_S, True)])
def test_nobody_watches_without_a_bound_or_after_the_end(seconds: float, closed: bool) -> None:
    assert _read(seconds, [6 * _PATIENCE_S] * 2, closed=closed) == ([0, 1], 0)


async def _read_beside_other_work() -> None:
    """The client reads at once; then other work blocks the event loop for longer than the limit."""
    reading = asyncio.get_running_loop().run_in_executor(None, time.sleep, _PATIENCE_S)
    time.sleep(6 * _PATIENCE_S)
    await reading


def test_a_reader_is_not_given_up_because_the_event_loop_was_held_up() -> None:
    async def over_grpc() -> None:
        unread = ReadTimeout(_items(2), 3 * _PATIENCE_S, lambda: given_up.append("gRPC"))
        for _ in range(2):
            await anext(unread)
            await _read_beside_other_work()
        unread.close()

    async def over_rest() -> None:
        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await _read_beside_other_work()

        stalled = partial(given_up.append, "REST")
        async with ChunkStream(send, stalled_after=3 * _PATIENCE_S, stalled=stalled, headers=[]) as chunks:
            await chunks.write(b"a")

    given_up: list[str] = []
    asyncio.run(over_grpc())
    asyncio.run(over_rest())
    assert not given_up
