"""Giving up a reader: only one that has an item and asks for no other, once, and never after the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mlserver_torch_stream.errors import TimedOut
from mlserver_torch_stream.server.streams.read_timeout import ReadTimeout

_PATIENCE_S = 0.05


async def _items(count: int, every_s: float = 0.0) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(every_s)
        yield number


def _read(seconds: float, pauses: list[float], *, every_s: float = 0.0, closed: bool = False) -> tuple[list[int], int]:
    """What a reader gets that pauses after each item, and how often it was given up."""
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


def test_items_that_are_late_are_not_the_readers_fault() -> None:
    assert _read(10 * _PATIENCE_S, [0.0] * 2, every_s=15 * _PATIENCE_S) == ([0, 1], 0)


def test_a_reader_that_stalls_is_given_up_once_and_told_if_it_comes_back() -> None:
    with pytest.raises(TimedOut, match=r"nothing was read for 0\.05 s"):
        _read(_PATIENCE_S, [0.0, 6 * _PATIENCE_S, 0.0])
    assert _read(_PATIENCE_S, [0.0, 6 * _PATIENCE_S]) == ([0, 1], 1)


@pytest.mark.parametrize(("seconds", "closed"), [(0.0, False), (_PATIENCE_S, True)])
def test_nobody_watches_without_a_bound_or_after_the_end(seconds: float, closed: bool) -> None:
    assert _read(seconds, [6 * _PATIENCE_S] * 2, closed=closed) == ([0, 1], 0)
