"""Waits for the pieces of one prompt, each within a time limit, until the stream that will answer it ends.

Knows nothing of what a piece is, nor of how pieces are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from mlserver_torch_stream.errors import NotServing, TimedOut
from mlserver_torch_stream.types import TokenEvent

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Call ``next`` until it returns None, then read the stream; call ``close`` in any case.

    ``next`` raises if no piece arrives for ``seconds`` (0: no limit), and if the stream ends meanwhile: at a deadline,
    a shutdown or a failure.
    """

    def __init__(self, pieces: AsyncIterator[T], stream: AsyncIterator[TokenEvent], seconds: float) -> None:
        self._pieces = pieces
        self._seconds = seconds
        # Nothing is generated before the prompt is whole: the first event is the stream's end.
        self._end = asyncio.ensure_future(anext(stream))
        self._following: asyncio.Future[T] | None = None

    async def next(self) -> T | None:
        """Raises TimedOut, or the error that has ended the stream."""
        self._following = asyncio.ensure_future(anext(self._pieces))
        await asyncio.wait(
            (self._end, self._following), timeout=self._seconds or None, return_when=asyncio.FIRST_COMPLETED
        )
        if self._end.done():
            raise self._reason()
        if not self._following.done():
            raise TimedOut(f"no further piece of the prompt came within {self._seconds:g} s")
        try:
            return self._following.result()
        except StopAsyncIteration:
            pass
        self._end.cancel()  # the stream has one reader at a time
        await asyncio.wait((self._end,))
        if not self._end.cancelled():
            raise self._reason()
        return None

    def _reason(self) -> BaseException:
        error = self._end.exception()
        if error is not None and not isinstance(error, StopAsyncIteration):
            return error
        last = None if error is not None else self._end.result().error
        return last or NotServing("the stream ended before the prompt was whole")

    def close(self) -> None:
        """Synchronous and idempotent: it may run in a task that cannot await any more."""
        for waiting in (self._end, self._following):
            if waiting is not None and not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # retrieved, so that asyncio does not log it
