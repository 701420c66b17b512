"""Ends a stream whose reader stalls: the reader must ask for the next item within a time limit.

Knows nothing of the items, nor of how a stream ends: it calls a function. The limit suits readers that ask for the next
item when the last one has been sent, as gRPC's reader does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from mlserver_torch_stream.errors import TimedOut

T = TypeVar("T")
# After a time limit, until the reader is given up. If other work has held up the event loop for so long, or the machine
# has, what the reader did meanwhile is still to be processed.
LAST_LOOK_S = 0.1


class ReadTimeout(Generic[T]):
    """Yields the items. If the reader takes none for ``seconds`` (0: no limit), calls ``stalled``, then raises."""

    def __init__(self, items: AsyncIterator[T], seconds: float, stalled: Callable[[], None]) -> None:
        self._items = items
        self._seconds = seconds
        self._stalled = stalled
        self._limited = seconds > 0
        self._given_up = False
        self._loop = asyncio.get_running_loop()
        self._given_at: float | None = None  # while the reader has an item
        self._overdue: float | None = None  # when the item was given whose time had passed at the last look
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        self._given_at = None
        if self._given_up:
            raise TimedOut(f"nothing was read for {self._seconds:g} s")
        item = await anext(self._items)
        self._given_at = self._loop.time()
        if self._limited and self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)
        return item

    def close(self) -> None:
        """Switches the limit off. Idempotent."""
        self._limited = False
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Ends the stream if the reader has held its item for too long, at two looks. Many items share one timer."""
        self._timer = None
        if self._given_at is None:
            return
        left = self._given_at + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif self._overdue != self._given_at:
            self._overdue = self._given_at
            self._timer = self._loop.call_later(LAST_LOOK_S, self._check)
        else:
            self._given_up = True
            self._stalled()
