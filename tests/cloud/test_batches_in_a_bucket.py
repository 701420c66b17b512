"""Files and batches in an S3 bucket work as in a folder, even after a restart and beside another process."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from mlserver_torch_stream.cloud.batches.batch_run import PART_ITEMS
from tests.batches.api import encoded, row
from tests.batches.bench import Bench, Echo

_TOTAL = 3 * PART_ITEMS + 2


@pytest.mark.long
def test_a_batch_in_a_bucket_goes_on_behind_its_last_part(bucket: str) -> None:
    async def run() -> None:
        models, again = Echo("tiny"), Echo("tiny")

        async def stick(said: str) -> None:
            if said == f"row {2 * PART_ITEMS + 3}":
                await asyncio.Event().wait()

        models.before = stick
        async with Bench(f"s3://{bucket}/deep/batches", models) as first:
            batch_id = await first.create([row(n) for n in range(_TOTAL)])
            await first.until(batch_id, lambda record: record.completed == 2 * PART_ITEMS)
        async with Bench(f"s3://{bucket}/deep/batches", again) as second:
            ended = await second.ended(batch_id)
            lines = await second.lines(ended.output_file_id)
            assert ended.status == "completed"
            assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(_TOTAL)]
            assert again.answered == Counter(f"row {n}" for n in range(2 * PART_ITEMS, _TOTAL))
            await second.places.files.delete(str(ended.output_file_id))

    asyncio.run(run())


@pytest.mark.long
def test_a_file_of_several_parts_of_a_bucket_comes_back_unchanged(bucket: str) -> None:
    async def run() -> None:
        content = encoded([row(n) for n in range(60_000)])
        async with Bench(f"s3://{bucket}", Echo()) as bench:
            upload = bench.places.files.begin()
            for start in range(0, len(content), 65536):
                await upload.write(content[start : start + 65536])
            file = await upload.end("rows.jsonl")
            assert file["bytes"] == len(content) > 2 * 5 * 2**20
            assert b"".join([each async for each in bench.places.files.content(file)]) == content

    asyncio.run(run())
