"""Sends the chunks of each object to a handler as the requests of a sequence, in order, one at a time.

For the stages, a row is a whole object here; its chunks are read while it is inferred. If the state of an object's
sequence is lost, only this object starts again, with a new sequence id.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace

from mlserver_torch_stream.cloud.parse import ChunkJoin
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import Failure, Infer, Kind, Outcome, Result, Row, SequenceLost
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import START, Cursor, Source, Wanted

_TRIES = 3  # how often an object is tried


@dataclass
class ObjectSequences:
    """Provides the rows for the objects of ``source``, and is the callable that infers them.

    ``infer`` gets one chunk at a time, with the id of its sequence, and raises SequenceLost if the object has to begin
    anew. At most ``most`` objects are inferred at a time, and they share the bytes that ``source`` may prefetch. Only
    one object at a time can start again (the lock is ``again``), so that the objects of a failed batch get into
    different batches.
    """

    source: Source
    infer: Infer
    metrics: RunMetrics
    most: int
    again: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._objects = {listed.info.key: listed for listed in self.source.objects}

    async def rows(self, cursor: Cursor = START, wanted: Wanted = lambda index: True) -> AsyncGenerator[Row, None]:
        """Yields a row without data for each object after ``cursor`` whose index is ``wanted``."""
        for index, listed in enumerate(self.source.objects[self.source.first(cursor) :], cursor.index):
            if wanted(index):
                key = listed.info.key
                yield Row(index, key, None, key, Kind.BYTES, failure=listed.failure, whole=listed.info.size)

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return [await self._object(row) for row in rows]

    async def _object(self, row: Row) -> Outcome:
        for number in range(_TRIES):
            try:
                async with self.again if number else nullcontext():
                    return await self._sequence(row)
            except SequenceLost as error:
                self.metrics.retried(error)
                lost = error
        return Outcome(failure=Failure(lost.code, f"{row.key}: at each of {_TRIES} tries: {lost.message}"))

    async def _sequence(self, row: Row) -> Outcome:
        """Returns the outcome of an object. Raises SequenceLost if the worker or the connection fails meanwhile."""
        name, join, unended = uuid.uuid4().hex, ChunkJoin(), True
        ahead = self.source.ahead
        share = PrefetchedRange(max(1, ahead.pieces // self.most), max(1, ahead.nbytes // self.most))
        source = replace(self.source, objects=[self._objects[row.key]], ahead=share)
        try:
            async with aclosing(source.rows()) as chunks:
                async for part in chunks:
                    if part.failure is not None or part.chunk is None:
                        return Outcome(failure=part.failure)
                    (outcome,) = await self.infer([replace(part, sequence=name)])
                    unended = not part.chunk.last
                    last = part.chunk.last or outcome.failure is not None
                    result = join.add(Result(replace(part, chunk=replace(part.chunk, last=last)), outcome))
                    if result is not None:
                        self.metrics.input_bytes += result.row.size
                        return result.outcome
            raise AssertionError(f"{row.key}: has no last chunk")
        finally:
            if unended and (end := getattr(self.infer, "end_sequence", None)) is not None:
                end(name)
