"""Keeps the records of batches, and changes them one at a time.

Knows nothing of what a change means. A change is conditional on the version that it was made from, as another process
may change the same record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mlserver_torch_stream.batches.batch_record import BatchRecord
from mlserver_torch_stream.batches.object_ids import BATCH
from mlserver_torch_stream.batches.pages import SUFFIX, PageQuery, read_object, read_page, stored_ids
from mlserver_torch_stream.batches.store_errors import translating_store_errors
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import ObjectChanged
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
