"""Keeps files: the content of each, and the object that describes it, which is written last.

A file exists once its object does; a content without one is never shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from mlserver_torch_stream.batches.batch_record import FILE, IdMaker
from mlserver_torch_stream.batches.pages import (
    SUFFIX,
    NoSuchObject,
    PageQuery,
    read_object,
    read_page,
    translating_store_errors,
)
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.rows import CloudError, ObjectMissing, RunRefused
from mlserver_torch_stream.cloud.store import ObjectUpload, Store

PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
_JSONL = ".jsonl"
_KEYS = {"id", "bytes", "filename", "purpose"}  # of a file's object, beside what every one has


def content_key(file_id: str) -> str:
    return file_id + _JSONL


class FileStore:
    """``objects`` and ``contents``: the two places of all files. Its methods raise RequestErrors."""

    def __init__(self, objects: Store, contents: Store, retry: Retry, ids: IdMaker) -> None:
        self._objects = objects
        self._contents = contents
        self._retry = retry
        self._ids = ids

    def begin(self) -> FileUpload:
        """A new file, to be written in pieces."""
        file_id = self._ids.make(FILE)
        return FileUpload(self, file_id, self._contents.upload(content_key(file_id)))

    async def get(self, file_id: str) -> dict[str, Any]:
        """Raises NoSuchObject for whatever is not the id of a file."""
        return await read_object(self._objects, FILE, "file", file_id, self._retry, _loads)

    async def page(self, query: PageQuery) -> dict[str, Any]:
        return await read_page(self._objects, FILE, query, self._retry, _loads)

    async def content(self, file: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The content in pieces. Nothing is sent before the first one, so that an error has its status."""
        with translating_store_errors():
            try:
                info = await self._retry.run(self._contents.head, content_key(file["id"]))
                async for piece in self._contents.read(info, 0, info.size):
                    yield piece
            except ObjectMissing:
                raise NoSuchObject("file", file["id"]) from None

    async def delete(self, file_id: str) -> dict[str, Any]:
        await self.get(file_id)
        with translating_store_errors():
            for store, key in ((self._objects, file_id + SUFFIX), (self._contents, content_key(file_id))):
                with suppress(ObjectMissing):
                    await self._retry.run(store.delete, [key])
        return {"id": file_id, "object": "file", "deleted": True}

    async def describe(self, file_id: str, size: int, filename: str, purpose: str) -> dict[str, Any]:
        """Writes the object of a file whose content is complete. Raises CloudError."""
        described = {
            "id": file_id,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "expires_at": None,
        }
        await self._retry.run(self._objects.put, file_id + SUFFIX, json.dumps(described).encode() + b"\n")
        return described

    async def drop_content(self, file_id: str) -> None:
        with suppress(CloudError):
            await self._contents.delete([content_key(file_id)])

    def rewrite(self, file_id: str) -> ObjectUpload:
        """The content of a file of a known id, such as one that a batch writes."""
        return self._contents.upload(content_key(file_id))


class FileUpload:
    """A file while it arrives. It exists once ``end`` has returned."""

    def __init__(self, files: FileStore, file_id: str, content: ObjectUpload) -> None:
        self._files = files
        self._id = file_id
        self._content = content
        self._whole = False

    @property
    def size(self) -> int:
        return self._content.size

    async def write(self, piece: bytes) -> None:
        with translating_store_errors():
            await self._content.write(piece)

    async def close(self) -> None:
        """The content is complete."""
        with translating_store_errors():
            await self._content.close()
        self._whole = True

    async def end(self, filename: str) -> dict[str, Any]:
        """The file's object."""
        with translating_store_errors():
            return await self._files.describe(self._id, self.size, filename, PURPOSE)

    async def discard(self) -> None:
        """Drops a content whose file is refused."""
        if self._whole:
            await self._files.drop_content(self._id)


def _loads(data: bytes) -> dict[str, Any]:
    """The object of a file. Raises RunRefused."""
    with suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict) and found.keys() >= _KEYS:
            return found
    raise RunRefused("the object of a file was not written by this program")
