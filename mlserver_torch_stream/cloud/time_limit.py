"""Waits for an answer for a limited time, and passes on an answer that its caller does not get.

Knows nothing of what is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


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
