"""Adapts the number of requests in flight: one more after each round of answers, half as many after a refusal.

``Concurrency`` knows no clock and no tasks; ``Gate`` makes tasks wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Concurrency:
    """Additive increase, multiplicative decrease, between 1 and ``most``. The refusal of a request that started before
    the last decrease does not decrease the limit again."""

    def __init__(self, most: int, start: int = 4) -> None:
        if most < 1:
            raise ValueError("at least one request is in flight")
        self.most = most
        self._limit = float(min(start, most))
        self._cuts = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def started(self) -> int:
        """A value that the request passes to ``refused`` if the server refuses it."""
        return self._cuts

    def answered(self) -> None:
        self._limit = min(float(self.most), self._limit + 1 / self._limit)

    def refused(self, started: int) -> None:
        if started == self._cuts:
            self._cuts += 1
            self._limit = max(1.0, self._limit / 2)


class Gate:
    """Lets as many tasks through at a time as ``concurrency`` allows, in the order of their arrival.

    A task that is to be alone waits until all others have left, and those behind it wait until it has left.
    """

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.inside = 0
        self._closed = False  # the task inside is alone
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @asynccontextmanager
    async def through(self, alone: bool = False) -> AsyncIterator[int]:
        """Yields the argument for ``Concurrency.refused``."""
        if not self._waiting and self._has_room(alone):
            self._enter(alone)
        else:
            await self._wait(alone)
        try:
            yield self.concurrency.started()
        finally:
            self._leave()

    def _has_room(self, alone: bool) -> bool:
        return not self._closed and self.inside < (1 if alone else self.concurrency.limit)

    def _enter(self, alone: bool) -> None:
        self.inside += 1
        self._closed = alone

    async def _wait(self, alone: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, alone))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the task was let through before it was cancelled
                self._leave()
            else:
                self._admit()  # the task may have been alone at the head, before others that have room
            raise

    def _leave(self) -> None:
        self.inside -= 1
        self._closed = False
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, alone = self._waiting[0]
            if not turn.done():  # a cancelled task's turn is done
                if not self._has_room(alone):
                    return
                self._enter(alone)
                turn.set_result(None)
            self._waiting.popleft()
