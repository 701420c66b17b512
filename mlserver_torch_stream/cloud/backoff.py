"""Retries a call with exponential back-off and jitter, and limits the requests in flight when a server refuses some.

``Retry.pause`` and ``Concurrency`` only calculate, without a clock or tasks; ``Gate`` makes tasks wait.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mlserver_torch_stream.cloud.rows import CloudError, StoreUnavailable

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries a call, up to ``tries`` attempts in all. The n-th pause lasts ``first * 2**n`` seconds, but at most
    ``longest`` seconds.

    Jitter shortens a pause by up to half.
    """

    tries: int = 6
    first: float = 0.1
    longest: float = 10.0

    def pause(self, failed: int, error: CloudError, draw: float | None = None) -> float:
        """Returns the seconds to wait after the ``failed``-th failure, counted from 1.

        ``draw`` in [0, 1) is the jitter.
        """
        jitter = random.random() if draw is None else draw
        pause: float = min(self.longest, self.first * 2.0 ** (failed - 1)) * (0.5 + jitter / 2)
        asked = error.retry_after if isinstance(error, StoreUnavailable) else None
        return pause if asked is None else min(self.longest, max(pause, asked))

    async def run(
        self,
        attempt: Callable[[Unpack[Ts]], Awaitable[T]],
        *args: Unpack[Ts],
        on_retry: Callable[[CloudError], None] | None = None,
    ) -> T:
        """Calls ``attempt(*args)`` until it succeeds, and returns its result. Raises the last CloudError.

        ``on_retry`` is called with each error that is followed by another attempt.
        """
        failed = 0
        while True:
            try:
                return await attempt(*args)
            except CloudError as error:
                failed += 1
                if not error.retriable or failed >= self.tries:
                    raise
                if on_retry is not None:
                    on_retry(error)
                await asyncio.sleep(self.pause(failed, error))


async def within(call: Awaitable[T], seconds: float, lost: Callable[[T], object] = lambda result: None) -> T:
    """Awaits ``call`` for at most ``seconds``.

    asyncio.wait_for is not used, because before Python 3.12 it swallows a cancellation that arrives together with the
    result, so that a run continued after a signal. If the caller is cancelled or the time is over, but the call still
    returns a result, ``lost`` is called with it.
    """
    future = asyncio.ensure_future(call)
    try:
        if not (await asyncio.wait({future}, timeout=seconds))[0]:
            raise asyncio.TimeoutError
        return future.result()
    except BaseException:
        future.add_done_callback(lambda ended: _pass_result(ended, lost))
        if future.cancel():
            await asyncio.wait({future})
        raise


def _pass_result(ended: asyncio.Future[T], lost: Callable[[T], object]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        lost(ended.result())


class Concurrency:
    """Limits the requests in flight by additive increase and multiplicative decrease, between 1 and ``most``.

    If a refused request had started before the last decrease, the limit does not decrease again.
    """

    def __init__(self, most: int, start: int = 4) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        self.most = most
        self._limit = float(min(start, most))
        self._cuts = 0

    @property
    def limit(self) -> int:
        """The number of requests that may run now, at least 1."""
        return int(self._limit)

    def started(self) -> int:
        """Returns the value that the request passes to ``refused`` if the server refuses the request."""
        return self._cuts

    def answered(self) -> None:
        """Increases the limit by 1 / limit, that is, by about one each time as many requests are answered as may be in
        flight.
        """
        self._limit = min(float(self.most), self._limit + 1 / self._limit)

    def refused(self, started: int) -> None:
        """Halves the limit, unless it was already halved after the request started."""
        if started == self._cuts:
            self._cuts += 1
            self._limit = max(1.0, self._limit / 2)


class Gate:
    """Lets tasks through in the order of their arrival, only as many at a time as ``concurrency`` allows.

    A task that must run alone waits until all other tasks have left, and later tasks wait until this task has left.
    """

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.inside = 0
        self._closed = False  # the task inside is alone
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @asynccontextmanager
    async def through(self, alone: bool = False) -> AsyncIterator[int]:
        """Waits until the task may pass, and yields the argument for ``Concurrency.refused``."""
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
