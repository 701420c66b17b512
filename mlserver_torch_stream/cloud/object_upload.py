"""Writes one object in pieces: it exists as a whole once ``close`` has returned, and not at all without that.

Knows nothing of the store's library: it is given an open file of it, and the call that bounds and translates.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class _OpenFile(Protocol):
    def write(self, data: bytes) -> Awaitable[int]: ...

    def close(self) -> Awaitable[None]: ...


class ObjectUpload:
    """``size``: the bytes that were written so far. Both methods raise CloudError.

    What a store got of an upload that was dropped is its own to clean up: in buckets, by a rule for incomplete
    multipart uploads.
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
