"""The pieces of one prompt as they arrive: in time, and as long as the stream that will answer it lives.

Knows nothing of what a piece is, nor of what is made of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from mlserver_torch_stream.errors import NotServing, TimedOut
from mlserver_torch_stream.types import TokenEvent

T = TypeVar("T")


class Arrivals(Generic[T]):
    """``next`` until it gives None, then the stream is its reader's; ``close`` in any case.

    A client that sends nothing for ``seconds`` (0: for ever) is told so without having to send, as it is of whatever
    ends its stream meanwhile: a deadline, a shutdown, a failure.
    """

    def __init__(self, pieces: AsyncIterator[T], stream: AsyncIterator[TokenEvent], seconds: float) -> None:
        self._pieces = pieces
        self._seconds = seconds
        # Nothing is generated before the prompt is whole: the first event is the stream's end.
        self._end = asyncio.ensure_future(anext(stream))
        self._following: asyncio.Future[T] | None = None

    async def next(self) -> T | None:
        """Raises TimedOut, or what has ended the stream."""
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
            await self._leave_stream()
            return None

    async def _leave_stream(self) -> None:
        """It has one reader at a time."""
        self._end.cancel()
        await asyncio.wait((self._end,))
        if not self._end.cancelled():
            raise self._reason()

    def _reason(self) -> BaseException:
        error = self._end.exception()
        if error is not None and not isinstance(error, StopAsyncIteration):
            return error
        told = None if error is not None else self._end.result().error
        return told or NotServing("the stream ended before the prompt was whole")

    def close(self) -> None:
        """Synchronous and idempotent: it may run where nothing can be awaited any more."""
        for waiting in (self._end, self._following):
            if waiting is not None and not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # it is nobody's any more
