"""Counts the requests that one model is answering, and holds the two events that end them: refuse, and abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class OneTimeEvent:
    """An event that is set once and never cleared. Unlike asyncio's, it can be awaited on any event loop."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        self.is_set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        if self.is_set:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


class InflightRequests:
    """Counts requests from their arrival until their last byte is handed to the transport.

    After ``refusing`` new work is refused and running requests may finish; after ``aborting`` running requests end now.
    """

    def __init__(self) -> None:
        self.refusing = OneTimeEvent()
        self.aborting = OneTimeEvent()
        self._count = 0
        self._emptied = OneTimeEvent()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Counts one request for as long as the block runs."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._emptied.set()
                self._emptied = OneTimeEvent()

    @property
    def empty(self) -> bool:
        return self._count == 0

    async def wait_until_empty(self) -> None:
        while self._count:
            await self._emptied.wait()


async def until(ended: OneTimeEvent, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yields the items until ``ended`` is set, also when it is set while the next item is awaited."""
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
        # Synchronous: this block may run in a task that cannot await any more.
        end.cancel()
        if following is not None:
            following.add_done_callback(_retrieve_exception)  # reading from a client that disconnected may raise
            following.cancel()


def _retrieve_exception(task: asyncio.Future[T]) -> None:
    """Keeps asyncio from logging the exception of a task that is not awaited any more."""
    if not task.cancelled():
        task.exception()
