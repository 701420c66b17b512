"""Fetches pieces of objects ahead of their reader, in order. The number of pieces and their total size are bounded.

If a piece cannot be fetched, the reader gets the error instead of the piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from io import BytesIO
from typing import Generic, Protocol, TypeVar

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.rows import CloudError, StoreUnavailable
from mlserver_torch_stream.cloud.store import ObjectInfo, ReadableStore


class HasSize(Protocol):
    """A piece; Prefetch only needs to know its size in bytes."""

    @property
    def size(self) -> int: ...


P = TypeVar("P", bound=HasSize)


@dataclass(frozen=True, slots=True)
class PrefetchedRange:
    """Bounds a prefetch. At most ``pieces`` pieces with at most ``nbytes`` bytes in total are in flight or wait for the
    reader.

    A single piece may be larger.
    """

    pieces: int = 32
    nbytes: int = 64 * 2**20


class Prefetch(Generic[P]):
    """Fetches pieces ahead of their reader.

    ``fetch`` starts one piece; ``peak_bytes`` is the maximum number of bytes held at a time.
    """

    def __init__(self, fetch: Callable[[P], asyncio.Future[bytes]], ahead: PrefetchedRange) -> None:
        self._fetch = fetch
        self._ahead = ahead
        self._pending: deque[tuple[P, asyncio.Future[bytes]]] = deque()
        self._held = 0
        self.peak_bytes = 0

    async def read(self, pieces: Iterator[P]) -> AsyncGenerator[tuple[P, bytes | CloudError], None]:
        """Yields each piece with its bytes, or with the error of its fetch, in the order of ``pieces``."""
        upcoming = next(pieces, None)
        try:
            while True:
                while upcoming is not None and self._fits(upcoming):
                    self._start(upcoming)
                    upcoming = next(pieces, None)
                if not self._pending:
                    return
                piece, future = self._pending[0]
                try:
                    found: bytes | CloudError = await future
                except CloudError as error:
                    found = error
                self._pending.popleft()
                yield piece, found
                found = b""  # so that its memory is free before the next piece is fetched
                self._held -= piece.size
        finally:
            await self._cancel()

    def _fits(self, piece: P) -> bool:
        if not self._pending:
            return True
        return len(self._pending) < self._ahead.pieces and self._held + piece.size <= self._ahead.nbytes

    def _start(self, piece: P) -> None:
        self._held += piece.size
        self.peak_bytes = max(self.peak_bytes, self._held)
        self._pending.append((piece, self._fetch(piece)))

    async def _cancel(self) -> None:
        futures = [future for _, future in self._pending]
        self._pending.clear()
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


async def fetch_range(
    store: ReadableStore, info: ObjectInfo, start: int, end: int, retry: Retry, on_retry: Callable[[CloudError], None]
) -> bytes:
    """Returns bytes ``start`` to ``end`` (exclusive) of one version of an object.

    After a broken connection only the missing bytes are fetched again.

    Raises CloudError when all tries of ``retry`` have failed, or immediately if a retry cannot help.
    """
    size = end - start
    data = BytesIO(bytes(size))  # has its full size from the start, so it is neither enlarged nor copied

    async def attempt() -> None:
        if data.tell() == size:  # the connection broke after the last byte, before the end of the answer
            return
        async with aclosing(store.read(info, start + data.tell(), end)) as chunks:
            async for chunk in chunks:
                if data.tell() + len(chunk) > size:
                    data.seek(0)  # none of them can be relied on
                    raise StoreUnavailable(f"{info.key}: the store sent more bytes than were requested")
                data.write(chunk)
        if data.tell() < size:
            raise StoreUnavailable(f"{info.key}: the body ended after {start + data.tell()} of {end} bytes")

    await retry.run(attempt, on_retry=on_retry)
    return data.getvalue()
