"""Infers the records of a Kafka topic. Each part is named after its first offset, and its offsets are committed once it
is durable.

No other module imports the Kafka client. If a part for the next offset of a partition already exists, a consumer wrote
it and died before the commit. The part's records are then skipped instead of inferred again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import claim
from mlserver_torch_stream.cloud.parse import parse_row
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.rows import Infer, ObjectExists, Row, StoreUnavailable, Weigh
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.store import Store, get_or_none
from mlserver_torch_stream.protocol.openai_batch import is_answered

_LOOK_MS = 500


def offset_part(topic: str, partition: int, first: int) -> str:
    """Returns the name of the part that begins with the record at offset ``first`` of a partition."""
    return f"part-{topic}-{partition:05d}-{first:020d}.jsonl"


@dataclass
class Topic:
    """Infers the records of one topic. A part ends after ``part_rows`` rows, or ``part_wait`` seconds after its first
    row.

    ``created`` is the creation time in the output rows, in seconds since the epoch; None means the time when the
    output's first consumer began.
    """

    servers: str
    topic: str
    group: str
    output: Store
    infer: Infer
    model: Mapping[str, Any]
    dead_letter: str | None = None
    part_rows: int = 64
    part_wait: float = 0.5
    limits: PipelineLimits = field(default_factory=PipelineLimits)
    weigh: Weigh = lambda row: row.size
    retry: Retry = field(default_factory=Retry)
    metrics: RunMetrics = field(default_factory=RunMetrics)
    created: int | None = None
    done: int = 0

    async def consume(self, most: int | None = None) -> None:
        """Runs until ``most`` records are durable and committed; None means forever. Raises CloudError."""
        config = {"topic": self.topic, "model": dict(self.model)}
        created = int(time.time()) if self.created is None else self.created
        self._run = await claim(self.output, config, created, self.retry)
        consumer = AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.servers,
            group_id=self.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        producer = AIOKafkaProducer(bootstrap_servers=self.servers) if self.dead_letter else None
        try:
            await consumer.start()
            if producer is not None:
                await producer.start()
            while most is None or self.done < most:
                found = await self._collect(consumer, most)
                await asyncio.gather(
                    *(self._part(consumer, producer, partition, records) for partition, records in found.items())
                )
        except KafkaError as error:
            raise StoreUnavailable(f"--kafka: {self.servers}: {error}") from None
        finally:
            await consumer.stop()
            if producer is not None:
                await producer.stop()

    async def _collect(self, consumer: Any, most: int | None) -> dict[Any, list[Any]]:
        """Collects records, by partition, until a part is full or ``part_wait`` seconds have passed since the first
        record.
        """
        room = self.part_rows if most is None else min(self.part_rows, most - self.done)
        found: dict[Any, list[Any]] = {}
        end: float | None = None
        while room > 0 and (end is None or time.monotonic() < end):
            wait = _LOOK_MS if end is None else max(1, round((end - time.monotonic()) * 1000))
            for partition, records in (await consumer.getmany(timeout_ms=wait, max_records=room)).items():
                found.setdefault(partition, []).extend(records)
                room -= len(records)
            if found and end is None:
                end = time.monotonic() + self.part_wait
        return found

    async def _part(self, consumer: Any, producer: Any, partition: TopicPartition, records: Sequence[Any]) -> None:
        while records:
            name = offset_part(partition.topic, partition.partition, records[0].offset)
            written = await get_or_none(self.output, name, self.retry)
            if written is None:
                data = await self._inferred(partition, records)
                try:
                    await self.retry.run(self.output.create, name, data)
                    written = data
                except ObjectExists:  # the partition's new consumer wrote it
                    continue
            rows = [json.loads(line) for line in written.splitlines()]
            last = rows[-1]["line"]
            records = await self._up_to(consumer, partition, records, last)
            if producer is not None:
                await self._send_failed(producer, records, {row["line"] for row in rows if not is_answered(row)})
            if not await self._commit(consumer, partition, last + 1):
                return
            self.done += sum(record.offset <= last for record in records)
            records = [record for record in records if record.offset > last]

    async def _up_to(self, consumer: Any, partition: Any, records: Sequence[Any], last: int) -> Sequence[Any]:
        """Returns all records of an existing part, which another consumer may have written with more records."""
        records = list(records)
        while records[-1].offset < last and partition in consumer.assignment():
            missing = last - records[-1].offset
            more = await consumer.getmany(partition, timeout_ms=_LOOK_MS, max_records=missing)
            records.extend(more.get(partition, ()))
        return records

    async def _inferred(self, partition: TopicPartition, records: Sequence[Any]) -> bytes:
        key = f"{partition.topic}/{partition.partition}"

        async def rows() -> AsyncGenerator[Row, None]:
            for record in records:
                yield parse_row(record.offset, key, record.offset, record.value or b"")

        async with aclosing(infer_rows(rows(), self.infer, self.limits, self.metrics, self.weigh)) as found:
            return b"".join([result.encode(self._run) async for result in found])

    async def _send_failed(self, producer: Any, records: Sequence[Any], failed: set[int]) -> None:
        """Sends failed records unchanged to the dead-letter topic. This happens before their offset is committed, so
        they arrive at least once.
        """
        for record in records:
            if record.offset in failed:
                origin = f"{record.topic}/{record.partition}/{record.offset}".encode()
                await producer.send_and_wait(
                    self.dead_letter, record.value, key=record.key, headers=[("origin", origin)]
                )

    async def _commit(self, consumer: Any, partition: TopicPartition, offset: int) -> bool:
        """Commits an offset. Returns False if another consumer now has the partition; it will find the part."""
        try:
            await consumer.commit({partition: offset})
        except (CommitFailedError, IllegalStateError):
            return False
        return True
