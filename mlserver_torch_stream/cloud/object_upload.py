"""Writes one object in pieces: the object exists once ``close`` has returned, and not before.

Knows nothing of the store's library: it is given a file that the library has opened, and a function that calls the
library with a time limit and turns its exceptions into CloudErrors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class _OpenFile(Protocol):
    def write(self, data: bytes) -> Awaitable[int]: ...

    def close(self) -> Awaitable[None]: ...


class ObjectUpload:
    """``size``: the bytes that were written so far. Both methods raise CloudError.

    An upload that is dropped before ``close`` may leave parts behind. The store has to delete them: in buckets a
    lifecycle rule for incomplete multipart uploads does.
    """

    def __init__(self, file: _OpenFile, call: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._file = file
        self._call = call
        self.size = 0

    async def write(self, data: bytes) -> None:
        await self._call(lambda: self._file.write(data))
        self.size += len(data)

    async def close(self) -> None:
        await self._call(self._file.close)
