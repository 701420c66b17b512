"""Keeps the records of batches at their places in one folder or bucket, and changes them one at a time.

A change holds only for the version that it was made from, because another process may change the same record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.batches.batch_record import BATCH, BatchRecord, IdMaker
from mlserver_torch_stream.batches.file_store import FileStore
from mlserver_torch_stream.batches.pages import (
    SUFFIX,
    BatchesOff,
    PageQuery,
    read_object,
    read_page,
    stored_ids,
    translating_store_errors,
)
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.rows import CloudError, ObjectChanged, RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.store import Store

Change = Callable[[BatchRecord], BatchRecord]


class BatchStore:
    """``get``, ``page`` and ``create`` are for requests and raise RequestErrors; the rest raise CloudErrors."""

    def __init__(self, records: Store, retry: Retry) -> None:
        self._records = records
        self._retry = retry
        self._changing = asyncio.Lock()

    async def create(self, record: BatchRecord) -> None:
        with translating_store_errors():
            await self._retry.run(self._records.put, record.id + SUFFIX, record.dumps())

    async def get(self, batch_id: str) -> BatchRecord:
        """Raises NoSuchObject for whatever is not the id of a batch."""
        return await read_object(self._records, BATCH, "batch", batch_id, self._retry, BatchRecord.loads)

    async def page(self, query: PageQuery) -> dict[str, Any]:
        return await read_page(self._records, BATCH, query, self._retry, lambda data: BatchRecord.loads(data).shown())

    async def ids(self) -> Sequence[str]:
        """All batches, the oldest first."""
        return sorted(await self._retry.run(stored_ids, self._records, BATCH))

    async def read(self, batch_id: str) -> BatchRecord:
        return BatchRecord.loads(await self._retry.run(self._records.get, batch_id + SUFFIX))

    async def change(self, batch_id: str, change: Change) -> BatchRecord:
        """Applies ``change`` to the record as it is by now, and returns the result."""
        key = batch_id + SUFFIX
        async with self._changing:
            while True:
                data, marks = await self._retry.run(self._records.look, key)
                was = BatchRecord.loads(data)
                now = change(was)
                if now == was:
                    return now
                try:
                    await self._retry.run(self._records.replace, key, now.dumps(), marks)
                    return now
                except ObjectChanged:
                    continue  # another process was faster, or the store's answer to our own write was lost


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """``url``: of the folder or bucket. ``runs/<batch>`` holds the parts of a batch that has not ended."""

    url: str
    files: FileStore
    batches: BatchStore
    retry: Retry

    @classmethod
    def open(cls, url: str, ids: IdMaker) -> BatchPlaces:
        """Raises BatchesOff, also where the library of stores is not installed."""
        if url.startswith(("http://", "https://")):
            raise BatchesOff("an HTTP server is for reading; files and batches need s3, gs, az or a folder")
        retry = Retry()
        try:
            url = Store.open(url).url
            files = FileStore(Store.open(f"{url}/files"), Store.open(f"{url}/contents"), retry, ids)
            return cls(url, files, BatchStore(Store.open(f"{url}/batches"), retry), retry)
        except CloudError as error:
            raise BatchesOff(error.message) from None

    @property
    def contents(self) -> str:
        return f"{self.url}/contents"

    def run(self, batch_id: str) -> str:
        return f"{self.url}/runs/{batch_id}"

    def open_run(self, batch_id: str) -> Store:
        """Raises StoreUnavailable, never RunRefused: the store was opened before, so it may well be again."""
        try:
            return Store.open(self.run(batch_id))
        except RunRefused as error:
            raise StoreUnavailable(error.message) from None
