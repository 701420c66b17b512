"""Runs one batch from its last stored part to its end: its models answer the rows until it is stopped.

If the run is killed, the next run of the same batch continues after the last part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from mlserver_torch_stream.batches.batch_files import BatchOutput, InputSummary, check_input, write_output_files
from mlserver_torch_stream.batches.batch_record import BatchProblem, BatchRecord, BatchStatus
from mlserver_torch_stream.batches.batch_store import BatchPlaces
from mlserver_torch_stream.batches.file_store import content_key
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import WriterLease, identify
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import Failure, Kind, ObjectMissing, Outcome, Result, Row, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, plan, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import Listed, Source
from mlserver_torch_stream.cloud.store import ObjectInfo, Store, settle
from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull, RequestError, UnknownModel
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.values import is_text, shown


class RowModel(Protocol):
    """A loaded model."""

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """OpenAI's object for the body of a row. It waits until the row may run beside the requests of clients.

        Raises RequestError: NotServing or QueueFull where the same row may be answered later.
        """


class RowModels(Protocol):
    """The models of this process."""

    async def settled(self) -> None:
        """Waits until no model is loading."""

    def find(self, name: str) -> RowModel | None:
        """The model that is loaded under this name; None if none is."""


_PAUSES = Retry(first=0.1, longest=5.0)  # before a row is tried again whose model cannot take it now

EXPIRED = Failure("batch_expired", "the batch's completion window ended before this row was answered")
CANCELLED = Failure("batch_cancelled", "the batch was cancelled before this row was answered")


class RowInference:
    """``expected``: models that were there when the batch was validated. A row waits for such a model where it is
    missing, since it is loading again; a row that names another one fails."""

    def __init__(self, models: RowModels, endpoint: str, expected: Collection[str]) -> None:
        self._models = models
        self._endpoint = endpoint
        self._expected = expected
        self._why: Failure | None = None
        self._stopped = asyncio.Event()

    def stop(self, why: Failure) -> None:
        """Fails every row without an answer, also a running one, with ``why``. Later calls change nothing."""
        self._why = self._why or why
        self._stopped.set()

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return [await self._outcome(row) for row in rows]

    async def _outcome(self, row: Row) -> Outcome:
        if self._why is not None:
            return Outcome(failure=self._why)
        answering = asyncio.ensure_future(self._answer(row.body or {}))
        stopping = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Outcome(failure=self._why)
            return Outcome(answering.result())
        except RequestError as error:
            return Outcome(failure=self._refusal(error))
        finally:
            answering.cancel()
            stopping.cancel()
            await asyncio.gather(answering, stopping, return_exceptions=True)

    async def _answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = self._named(body)
        failed = 0
        while True:
            model = self._models.find(name)
            if model is None and name not in self._expected:
                raise UnknownModel(name)
            if model is not None:
                with suppress(NotServing, QueueFull):  # the row is tried again after a pause
                    return await model.answer(self._endpoint, body)
            failed += 1
            await asyncio.sleep(_PAUSES.pause(min(failed, 8), StoreUnavailable("")))

    def _refusal(self, error: RequestError) -> Failure:
        status, body = OPENAI_SPELLINGS[self._endpoint].refusal(error)
        described = body["error"]
        return Failure(described["code"] or described["type"], described["message"], status, described)

    def _named(self, body: Mapping[str, Any]) -> str:
        """The model that the row names. Raises InvalidInput."""
        prompt = OPENAI_SPELLINGS[self._endpoint].prompt
        if prompt not in body:
            raise InvalidInput("url", f"must be {self._endpoint}, as the batch says, which takes {prompt}")
        if body.get("model_version") is not None:
            raise InvalidInput("model_version", "is not for rows of a batch: the newest version answers")
        name = body.get("model")
        if not is_text(name):
            raise InvalidInput("model", f"must name a model of this server, got {shown(name)}")
        return str(name)


logger = logging.getLogger(__name__)

_BLOCK_ROWS = 512  # of the rows of a stopped batch that are written at once
PART_ROWS = 16  # a kill costs the inference of less than a part, and of the rows that are being answered
# A row is a batch of the pipeline of its own, and waits for its model there; the window bounds how many.
_LIMITS = PipelineLimits(window=256, window_bytes=32 * 2**20, batch_rows=1, max_wait=0.0, batches=256)
_AHEAD = PrefetchedRange(4, 16 * 2**20)


class BatchRun:
    """One batch in this process."""

    def __init__(self, batch_id: str, places: BatchPlaces, models: RowModels) -> None:
        self._id = batch_id
        self._places = places
        self._models = models
        self._inference: RowInference | None = None
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        """The record says ``cancelling``. Rows without an answer fail, and the run ends."""
        self.cancelled.set()
        if self._inference is not None:
            self._inference.stop(CANCELLED)

    async def run(self) -> None:
        """Raises CloudError; delivered rows are kept, and the run may be tried again."""
        record = await self._places.batches.read(self._id)
        if record.status is BatchStatus.VALIDATING or (record.status is BatchStatus.CANCELLING and not record.total):
            record = await self._validate(record)
        if record.status.ended:
            return
        if record.status is BatchStatus.IN_PROGRESS:
            await self._infer(record)
        await self._finish()

    async def fail(self, problem: BatchProblem) -> None:
        await self._change(lambda batch: replace(_moved(batch, BatchStatus.FAILED), problems=(problem,)))

    async def _validate(self, record: BatchRecord) -> BatchRecord:
        contents = Store.open(self._places.contents, make=False)
        summary = InputSummary(0, (), (BatchProblem("missing", "the input file is not there", "input_file_id"),))
        with suppress(ObjectMissing):
            info = await self._places.retry.run(contents.head, content_key(record.input_file_id))
            # At a server's start a model that rows name may not be there yet.
            await first_of(self._models.settled(), self.cancelled.wait())
            rows = self._source(contents, info).rows()
            summary = await check_input(rows, lambda name: self._models.find(name) is not None)

        def validated(batch: BatchRecord) -> BatchRecord:
            if batch.status is BatchStatus.CANCELLING:  # meanwhile: the error file of a valid input names its rows
                return _moved(batch, BatchStatus.CANCELLED) if summary.problems else replace(batch, total=summary.rows)
            if batch.status is not BatchStatus.VALIDATING:
                return batch
            if summary.problems:
                return replace(_moved(batch, BatchStatus.FAILED), problems=summary.problems)
            return replace(_moved(batch, BatchStatus.IN_PROGRESS), total=summary.rows, models=summary.models)

        return await self._change(validated)

    def _source(self, contents: Store, info: ObjectInfo) -> Source:
        return Source(contents, [Listed(info)], Kind.JSONL, retry=self._places.retry, ahead=_AHEAD)

    async def _infer(self, record: BatchRecord) -> None:
        """Answers the rows that no part holds, until the batch is stopped."""
        self._places.open_run(self._id)
        try:
            planned = await plan(self._cloud_run(record))
            async with self._stoppable(record) as inference:
                await self._written(planned.done.rows, planned.done.failed)
                await write(planned, inference, RunMetrics(), written=self._written, stopped=inference.is_stopped)
        finally:
            await settle()

    def _cloud_run(self, record: BatchRecord) -> CloudRun:
        return CloudRun(
            input=f"{self._places.contents}/{content_key(record.input_file_id)}",
            model={"endpoint": record.endpoint},
            output=self._places.run(self._id),
            kind=Kind.JSONL,
            part_rows=PART_ROWS,
            limits=_LIMITS,
            ahead=_AHEAD,
            retry=self._places.retry,
            created=record.created_at,
        )

    @asynccontextmanager
    async def _stoppable(self, record: BatchRecord) -> AsyncIterator[RowInference]:
        """The inference of the rows, which the end of the completion window and ``cancel`` stop."""
        inference = self._inference = RowInference(self._models, record.endpoint, record.models)
        if self.cancelled.is_set() or record.status is BatchStatus.CANCELLING:
            inference.stop(CANCELLED)
        left = record.expires_at - time.time()
        if left <= 0:
            inference.stop(EXPIRED)
        timer = asyncio.get_running_loop().call_later(left, inference.stop, EXPIRED)
        try:
            yield inference
        finally:
            timer.cancel()
            self._inference = None

    async def _written(self, rows: int, failed: int) -> None:
        """Counts the rows that are in parts. Another process may have cancelled the batch: this one learns it here."""
        record = await self._change(lambda batch: batch.counted(rows, failed))
        if record.status is BatchStatus.CANCELLING:
            self.cancel()

    async def _finish(self) -> None:
        places = self._places
        parts = places.open_run(self._id)
        async with WriterLease(parts, 1, 1, places.retry):
            record = await self._change(_finalizing)
            if record.status.ended:
                return  # another process has done it
            missing = partial(self._missing, record)
            output = await write_output_files(self._id, parts, places.files, places.retry, missing)
            record = await self._change(lambda batch: _ended(batch, output))
        logger.info("Batch %s: %s, %d of %d rows failed", self._id, record.status.value, record.failed, record.total)
        with suppress(ObjectMissing):
            await parts.delete([info.key async for info in parts.list()])

    async def _missing(self, record: BatchRecord, begin: int) -> AsyncGenerator[bytes, None]:
        """The output rows from number ``begin`` on, which no part holds as the batch was stopped before: parts of 16
        failed rows would take minutes."""
        if begin >= record.total:
            return
        why = CANCELLED if record.status is BatchStatus.CANCELLING else EXPIRED
        identity = identify(self._cloud_run(record).config(), record.created_at)
        contents = Store.open(self._places.contents, make=False)
        info = await self._places.retry.run(contents.head, content_key(record.input_file_id))
        lines: list[bytes] = []
        async with aclosing(self._source(contents, info).rows(wanted=lambda index: index >= begin)) as rows:
            async for row in rows:
                lines.append(Result(row, Outcome(failure=row.failure or why)).encode(identity))
                if len(lines) == _BLOCK_ROWS:
                    yield b"".join(lines)
                    lines.clear()
        yield b"".join(lines)

    async def _change(self, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        return await self._places.batches.change(self._id, change)


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when the first wait ends, and cancels the other waits. An error of the first wait is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _moved(batch: BatchRecord, status: BatchStatus) -> BatchRecord:
    return batch.moved(status, int(time.time()))


def _finalizing(batch: BatchRecord) -> BatchRecord:
    return _moved(batch, BatchStatus.FINALIZING) if batch.status is BatchStatus.IN_PROGRESS else batch


def _ended(batch: BatchRecord, output: BatchOutput) -> BatchRecord:
    if batch.status is BatchStatus.CANCELLING:
        status = BatchStatus.CANCELLED
    else:
        status = BatchStatus.EXPIRED if EXPIRED.code in output.codes else BatchStatus.COMPLETED
    counted = batch.counted(output.completed + output.failed, output.failed)
    return replace(_moved(counted, status), output_file_id=output.output_file_id, error_file_id=output.error_file_id)
