"""A process that watches SNS messages, with SNS's certificates from a host on this machine; tests may kill it.

It listens as ``cloud watch --listen --sns-topic`` does, for the folder ``in`` of a bucket, and writes to ``sns``. Its
model appends the text of each object that it gets to a file, and answers with the reversed text.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import WriterLease
from mlserver_torch_stream.cloud.listen import EventListener
from mlserver_torch_stream.cloud.naming import glob_pattern
from mlserver_torch_stream.cloud.notifications import InputPlace
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.cloud.watch import Watcher
from tests.cloud.test_listen import sns_verifier


async def main(bucket: str, storage: dict[str, str], port: int, url: str, authority: str, asked: str) -> None:
    async def infer(rows: Sequence[Row]) -> list[Outcome]:
        with Path(asked).open("a") as notes:
            notes.writelines(f"{row.data.decode()}\n" for row in rows)
        return [Outcome({"text": row.data.decode()[::-1]}) for row in rows]

    output = Store.open(f"s3://{bucket}/sns", storage)
    records = Store.open(f"s3://{bucket}/sns/events", storage)
    async with WriterLease(output, 1, 1, Retry()) as lease:
        place = InputPlace.of_url(f"s3://{bucket}/in", glob_pattern("**"))
        sns = sns_verifier(url, authority)
        listener = EventListener("127.0.0.1", port, place, records, Retry(), print, check=lease.require, sns=sns)
        watcher = Watcher(Store.open(f"s3://{bucket}/in", storage), output, infer, {})
        await watcher.watch(listener.announcements())


if __name__ == "__main__":
    bucket, storage, port, url, authority, asked = sys.argv[1:]
    asyncio.run(main(bucket, json.loads(storage), int(port), url, authority, asked))
