"""Retries a call with exponential back-off and jitter, and waits for an answer for a limited time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mlserver_torch_stream.cloud.rows import CloudError, StoreUnavailable

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """There are ``tries`` attempts in all. The n-th pause is ``first * 2**n`` seconds, at most ``longest``. Jitter
    shortens it by up to half."""

    tries: int = 6
    first: float = 0.1
    longest: float = 10.0

    def pause(self, failed: int, error: CloudError, draw: float | None = None) -> float:
        """The seconds to wait after the ``failed``-th failure, counted from 1. ``draw`` in [0, 1) is the jitter."""
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
        """Returns what the first ``attempt`` with ``args`` that succeeds returns. Raises the last CloudError.

        ``on_retry`` is called with each error after which another attempt follows.
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
    """Stands in for asyncio.wait_for, which before Python 3.12 swallows a cancellation that arrives together with the
    answer, so that a run went on after a signal.

    If the caller is cancelled or the time is over, and the call has a result all the same, ``lost`` is called with it.
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
