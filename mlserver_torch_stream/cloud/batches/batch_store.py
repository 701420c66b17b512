"""Stores files and the records of batches in one folder or bucket: JSON objects, and the contents of the files.

The methods raise CloudError, and NoSuchObject for an object that is missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.batches.batch_record import BatchRecord, IdMaker
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    ObjectChanged,
    ObjectMissing,
    RunRefused,
    StorageFull,
    StoreUnavailable,
)
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.errors import NotServing, RequestError
from mlserver_torch_stream.protocol.openai_batch_models import BATCH, FILE, PURPOSE, is_id

logger = logging.getLogger(__name__)

_SUFFIX = ".json"
_AT_ONCE = 32  # objects that are read at a time
_KEYS = {"id", "bytes", "filename", "purpose"}  # keys of a file's object whose values differ from file to file
T = TypeVar("T")


class BatchesOff(RequestError):
    """The server has no store for files and batches."""

    status = 404


class NoSuchObject(RequestError):
    """No file or batch has this id."""

    status = 404

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"no {kind} has the id {name[:100]!r}")


class StoreFull(RequestError):
    """The store has no room left."""

    status = 507


@contextmanager
def translating_store_errors() -> Iterator[None]:
    """Turns a store's error into a RequestError. The details are logged and not sent to the client."""
    try:
        yield
    except StorageFull as error:
        logger.error("The store of files and batches is full: %s", error.message)
        raise StoreFull("the store of files and batches is full") from None
    except CloudError as error:
        logger.error("The store of files and batches failed: %s", error.message)
        raise NotServing(f"the store of files and batches does not answer ({error.code})") from None


class _Objects(Generic[T]):
    """The JSON objects of one kind.

    ``loads`` reads a stored object and raises RunRefused if it is damaged; ``shown`` converts the object to OpenAI's
    format.
    """

    def __init__(
        self, store: Store, prefix: str, loads: Callable[[bytes], T], shown: Callable[[T], dict[str, Any]], retry: Retry
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._loads = loads
        self._shown = shown
        self._retry = retry

    async def get(self, object_id: str) -> T:
        """Returns the object with this id. Raises NoSuchObject if there is none, or if the text is not an id."""
        if is_id(self._prefix, object_id):
            with suppress(ObjectMissing):
                return self._loads(await self._retry.run(self._store.get, object_id + _SUFFIX))
        raise NoSuchObject(self._prefix.rstrip("-_"), object_id)

    async def put(self, object_id: str, data: bytes) -> None:
        await self._retry.run(self._store.put, object_id + _SUFFIX, data)

    async def ids(self) -> list[str]:
        """Returns all ids, the oldest first."""
        return sorted(await self._retry.run(self._stored_ids))

    async def page(
        self, limit: int, after: str | None = None, order: str = "desc", purpose: str | None = None
    ) -> dict[str, Any]:
        """Returns one page as OpenAI's list object. Damaged objects are left out, so that listing does not fail because
        of them.
        """
        ids = await self.ids()
        if order == "desc":
            ids.reverse()
        if after is not None:
            ids = [name for name in ids if (name < after if order == "desc" else name > after)]
        found: list[dict[str, Any]] = []
        for start in range(0, len(ids), _AT_ONCE):
            if len(found) > limit:
                break
            objects = await asyncio.gather(*map(self._listed, ids[start : start + _AT_ONCE]))
            found += [shown for shown in objects if shown is not None and purpose in (None, shown.get("purpose"))]
        data = found[:limit]
        ends = [shown["id"] for shown in data] or [None]
        more = len(found) > limit
        return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[-1], "has_more": more}

    async def _stored_ids(self) -> list[str]:
        names = [info.key.removesuffix(_SUFFIX) async for info in self._store.list() if info.key.endswith(_SUFFIX)]
        return [name for name in names if is_id(self._prefix, name)]

    async def _listed(self, name: str) -> dict[str, Any] | None:
        try:
            return self._shown(await self.get(name))
        except NoSuchObject:
            return None  # it was deleted meanwhile
        except RunRefused as error:
            logger.error("%s is not listed: %s", name, error.message)
            return None


def content_key(file_id: str) -> str:
    """Returns the key under which the content of a file is stored."""
    return f"{file_id}.jsonl"


class FileStore(_Objects[dict[str, Any]]):
    """Stores files. Their JSON objects are in this store, and their bytes in ``contents``.

    The JSON object of a file is written last; the file exists only from then on.
    """

    def __init__(self, objects: Store, contents: Store, retry: Retry, ids: IdMaker) -> None:
        super().__init__(objects, FILE, _load_file, dict, retry)
        self._contents = contents
        self._ids = ids

    def begin(self, file_id: str | None = None, purpose: str = PURPOSE) -> FileUpload:
        """Begins a file that is written in pieces. Without ``file_id`` the file gets a new id."""
        return FileUpload(self, self._contents, file_id or self._ids.make(FILE), purpose)

    async def content(self, file: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yields the content of a file in pieces."""
        try:
            info = await self._retry.run(self._contents.head, content_key(file["id"]))
            async for piece in self._contents.read(info, 0, info.size):
                yield piece
        except ObjectMissing:
            raise NoSuchObject("file", file["id"]) from None

    async def delete(self, file_id: str) -> dict[str, Any]:
        await self.get(file_id)
        for store, key in ((self._store, file_id + _SUFFIX), (self._contents, content_key(file_id))):
            with suppress(ObjectMissing):
                await self._retry.run(store.delete, [key])
        return {"id": file_id, "object": "file", "deleted": True}


class FileUpload:
    """A file while it is written. The file exists once ``end`` has returned."""

    def __init__(self, files: FileStore, contents: Store, file_id: str, purpose: str) -> None:
        self.id = file_id
        self._files = files
        self._contents = contents
        self._purpose = purpose
        self._content = contents.upload(content_key(file_id))
        self.write = self._content.write

    @property
    def size(self) -> int:
        return self._content.size

    async def end(self, filename: str) -> dict[str, Any]:
        """Ends the file and returns its JSON object. If the JSON object cannot be written, the content is deleted."""
        described = {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": self._purpose,
            "status": "processed",
            "expires_at": None,
        }
        await self._content.close()
        try:
            await self._files.put(self.id, json.dumps(described).encode() + b"\n")
        except BaseException:
            with suppress(CloudError):
                await self._contents.delete([content_key(self.id)])
            raise
        return described


def _load_file(data: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict) and found.keys() >= _KEYS:
            return found
    raise RunRefused("the object of a file was not written by this program")


class BatchStore(_Objects[BatchRecord]):
    """The records of batches."""

    def __init__(self, records: Store, retry: Retry) -> None:
        super().__init__(records, BATCH, BatchRecord.loads, BatchRecord.shown, retry)
        self._changing = asyncio.Lock()

    async def change(self, batch_id: str, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Applies ``change`` to the current record, stores the result and returns it.

        If another process changes the record meanwhile, ``change`` is applied again to the new version of the record.
        """
        key = batch_id + _SUFFIX
        async with self._changing:
            while True:
                data, marks = await self._retry.run(self._store.look, key)
                was = BatchRecord.loads(data)
                now = change(was)
                if now == was:
                    return now
                try:
                    await self._retry.run(self._store.replace, key, now.dumps(), marks)
                    return now
                except ObjectChanged:
                    continue  # another process was faster, or the store's answer to our own write was lost


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """The stores of files and batches below ``url``, a folder or bucket.

    ``runs/<batch>`` contains the parts of a batch that has not ended.
    """

    url: str
    files: FileStore
    batches: BatchStore
    retry: Retry

    @classmethod
    def open(cls, url: str, ids: IdMaker) -> BatchPlaces:
        """Opens the stores. Raises BatchesOff if the URL or the object-store library cannot be used."""
        if url.startswith(("http://", "https://")):
            raise BatchesOff("an HTTP server can only be read; files and batches need a folder or an s3, gs or az URL")
        retry = Retry()
        try:
            url = Store.open(url).url
            files = FileStore(Store.open(f"{url}/files"), Store.open(f"{url}/contents"), retry, ids)
            return cls(url, files, BatchStore(Store.open(f"{url}/batches"), retry), retry)
        except CloudError as error:
            raise BatchesOff(error.message) from None

    @property
    def contents(self) -> str:
        """The URL below which the contents of files are stored."""
        return f"{self.url}/contents"

    def run(self, batch_id: str) -> str:
        return f"{self.url}/runs/{batch_id}"

    def open_run(self, batch_id: str) -> Store:
        """Opens the store of a batch's parts.

        Raises StoreUnavailable instead of RunRefused: the store could be opened before, so a later attempt may succeed.
        """
        try:
            return Store.open(self.run(batch_id))
        except RunRefused as error:
            raise StoreUnavailable(error.message) from None
