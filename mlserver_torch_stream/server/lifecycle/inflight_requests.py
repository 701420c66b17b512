"""The requests that one model is answering now, and whether they are to come to an end.

Knows nothing of what a request is, nor of why it should end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class OneTimeEvent:
    """Comes once, and can be waited for on any event loop."""

    def __init__(self) -> None:
        self.has_come = False
        self._waiting: set[asyncio.Future[None]] = set()

    def come(self) -> None:
        self.has_come = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        if self.has_come:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)


class InflightRequests:
    """Counts requests from their arrival until their last byte is on its way.

    ``refusing``: no new work, what runs may finish. ``aborting``: what still runs ends now.
    """

    def __init__(self) -> None:
        self.refusing = OneTimeEvent()
        self.aborting = OneTimeEvent()
        self._open = 0
        self._emptied = OneTimeEvent()

    @contextmanager
    def one(self) -> Iterator[None]:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if self._open == 0:
                self._emptied.come()
                self._emptied = OneTimeEvent()

    @property
    def empty(self) -> bool:
        return self._open == 0

    async def none_left(self) -> None:
        while self._open:
            await self._emptied.wait()


async def until(ended: OneTimeEvent, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The items up to a moment that somebody else chooses, also while the next one is being waited for."""
    end = asyncio.create_task(ended.wait())
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(items))
            await asyncio.wait((end, following), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        # Synchronous: this may run where nothing can be awaited any more.
        end.cancel()
        if following is not None:
            following.add_done_callback(_see)  # reading from a client that has left may raise
            following.cancel()


def _see(task: asyncio.Future[T]) -> None:
    """Nobody waits for it any more, and asyncio would log its exception as never retrieved."""
    if not task.cancelled():
        task.exception()
