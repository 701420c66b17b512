"""A watcher holds no more of an object in memory than the options of a run allow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from mlserver_torch_stream.cloud.parse import Chunking
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import Kind, Outcome, Row
from mlserver_torch_stream.cloud.store import ObjectInfo, Store, settle
from mlserver_torch_stream.cloud.watch import Announced, Watcher


class _CountedStore(Store):
    """``most`` is the largest number of ranges that were read at the same time."""

    reading = most = 0

    async def read(self, info: ObjectInfo, start: int, end: int) -> AsyncGenerator[bytes, None]:
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            async for data in super().read(info, start, end):
                yield data
        finally:
            self.reading -= 1


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_watcher_fetches_as_many_ranges_ahead_as_it_is_told(tmp_path: Path, ahead: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "large").write_bytes(bytes(9 * 2**20))

    async def infer(rows: Sequence[Row]) -> list[Outcome]:
        return [Outcome({"predictions": [len(row.data)]}) for row in rows]

    async def done() -> None: ...

    async def announcements() -> AsyncGenerator[Announced, None]:
        yield Announced("large", done)

    async def watched() -> int:
        store, output = _CountedStore.open(str(tmp_path / "in")), Store.open(str(tmp_path / "out"))
        assert isinstance(store, _CountedStore)
        chunks, bound = Chunking(3 * 2**20), PrefetchedRange(ahead)
        watcher = Watcher(store, output, infer, {}, Kind.BYTES, chunking=chunks, ahead=bound)
        await watcher.watch(announcements())
        await settle()
        return store.most

    assert (asyncio.run(watched()) == 1) is (ahead == 1)
