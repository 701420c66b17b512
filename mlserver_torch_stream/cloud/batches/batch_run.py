"""Runs one batch from its last stored part to its end. The models answer the items until the batch is stopped.

If the run is killed, the next run of the same batch continues after the last part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.batches.batch_files import InputSummary, OutputFile, check_input, write_output_files
from mlserver_torch_stream.cloud.batches.batch_record import BatchProblem, BatchRecord
from mlserver_torch_stream.cloud.batches.batch_store import BatchPlaces, content_key
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

logger = logging.getLogger(__name__)

_PAUSES = Retry(first=0.1, longest=5.0)  # between tries of an item that its model cannot take now
_BLOCK_ITEMS = 512  # items of a stopped batch that are written at a time
PART_ITEMS = 16  # a killed process loses less than one part, and the items that are being answered
# Each item is a batch of its own for the pipeline, and waits there for its model; the window bounds their number.
_LIMITS = PipelineLimits(window=256, window_bytes=32 * 2**20, batch_rows=1, max_wait=0.0, batches=256)
_AHEAD = PrefetchedRange(4, 16 * 2**20)

EXPIRED = Failure("batch_expired", "the batch's completion window ended before this row was answered")
CANCELLED = Failure("batch_cancelled", "the batch was cancelled before this row was answered")


class BatchModels(Protocol):
    """The models of this process."""

    async def settled(self) -> None:
        """Waits until no model is loading."""

    def has(self, name: str) -> bool:
        """Returns True if a model, or an adapter of one, is loaded under this name."""

    async def answer(self, name: str, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns OpenAI's object for the body of an item. Waits until the item may run concurrently with the requests
        of clients.

        Raises RequestError: UnknownModel, or NotServing or QueueFull if the item can be answered later.
        """


class ItemInference:
    """Infers the items of a batch.

    ``expected`` are the models and adapters that were loaded when the batch was validated. If one of these is missing
    now, it is being loaded again, so the items for this model wait. An item that names any other missing model fails.
    """

    def __init__(self, models: BatchModels, endpoint: str, expected: Collection[str]) -> None:
        self._models = models
        self._endpoint = endpoint
        self._expected = expected
        self._why: Failure | None = None
        self._stopped = asyncio.Event()
        self.is_stopped = self._stopped.is_set

    def stop(self, why: Failure) -> None:
        """Makes every item without an answer fail with ``why``, including running items. Later calls change nothing."""
        self._why = self._why or why
        self._stopped.set()

    async def __call__(self, items: Sequence[Row]) -> list[Outcome]:
        return [await self._outcome(item.body or {}) for item in items]

    async def _outcome(self, body: Mapping[str, Any]) -> Outcome:
        if self._why is not None:
            return Outcome(failure=self._why)
        try:
            answer = await first_of(self._answer(body), self._stopped.wait())
            return Outcome(failure=self._why) if answer is True else Outcome(answer)
        except RequestError as error:
            status, refusal = OPENAI_SPELLINGS[self._endpoint].refusal(error)
            described = refusal["error"]
            return Outcome(
                failure=Failure(described["code"] or described["type"], described["message"], status, described)
            )

    async def _answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = self._model(body)
        failed = 0
        while True:
            try:
                return await self._models.answer(name, self._endpoint, body)
            except UnknownModel:
                if name not in self._expected:
                    raise
            except (NotServing, QueueFull):
                pass
            failed += 1
            await asyncio.sleep(_PAUSES.pause(min(failed, 8), StoreUnavailable("")))

    def _model(self, body: Mapping[str, Any]) -> str:
        """Returns the model that the item names. Raises InvalidInput."""
        prompt = OPENAI_SPELLINGS[self._endpoint].prompt
        if prompt not in body:
            raise InvalidInput("url", f"must be {self._endpoint}, the batch's endpoint, with {prompt!r} in the body")
        if body.get("model_version") is not None:
            raise InvalidInput("model_version", "cannot be set for rows of a batch; the newest version answers them")
        name = body.get("model")
        if not is_text(name):
            raise InvalidInput("model", f"must name a model of this server, got {shown(name)}")
        return str(name)


class BatchRun:
    """Runs one batch in this process."""

    def __init__(self, record: BatchRecord, places: BatchPlaces, models: BatchModels) -> None:
        self.id = record.id
        self.input_file_id = record.input_file_id
        self.cancelled = asyncio.Event()
        self._places = places
        self._models = models
        self._inference: ItemInference | None = None
        self._change = partial(places.batches.change, record.id)

    def cancel(self) -> None:
        """Ends the run of a batch whose record says ``cancelling``. Items without an answer fail."""
        self.cancelled.set()
        if self._inference is not None:
            self._inference.stop(CANCELLED)

    async def run(self) -> None:
        """Runs the batch to its end.

        Raises CloudError if the store or the model fails; delivered items are then kept, and the run may be tried
        again.
        """
        record = await self._places.batches.get(self.id)
        if record.status == "validating" or (record.status == "cancelling" and not record.total):
            record = await self._validate(record)
        if record.ended:
            return
        if record.status == "in_progress":
            await self._infer(record)
        await self._finish()

    async def fail(self, problem: BatchProblem) -> None:
        """Ends the batch as failed, with this problem in its record."""
        await self._change(lambda batch: batch.moved("failed", problems=(problem,)))

    async def _validate(self, record: BatchRecord) -> BatchRecord:
        summary = InputSummary(problems=(BatchProblem("missing", "the input file does not exist", "input_file_id"),))
        with suppress(ObjectMissing):
            source = await self._source(record)
            # When a server starts, a model that items name may not be loaded yet.
            await first_of(self._models.settled(), self.cancelled.wait())
            summary = await check_input(source.rows(), self._models.has)

        def validated(batch: BatchRecord) -> BatchRecord:
            if batch.status == "cancelling":  # its error file names the items of a valid input
                return batch.moved("cancelled") if summary.problems else replace(batch, total=summary.items)
            if batch.status != "validating":
                return batch
            if summary.problems:
                return batch.moved("failed", problems=summary.problems)
            return batch.moved("in_progress", total=summary.items, models=summary.models)

        return await self._change(validated)

    async def _source(self, record: BatchRecord) -> Source:
        contents = Store.open(self._places.contents, make=False)
        info: ObjectInfo = await self._places.retry.run(contents.head, content_key(record.input_file_id))
        return Source(contents, [Listed(info)], Kind.JSONL, retry=self._places.retry, ahead=_AHEAD)

    async def _infer(self, record: BatchRecord) -> None:
        """Answers the items that are not in any part yet, until the batch is stopped."""
        self._places.open_run(self.id)
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
            output=self._places.run(self.id),
            kind=Kind.JSONL,
            part_rows=PART_ITEMS,
            limits=_LIMITS,
            ahead=_AHEAD,
            retry=self._places.retry,
            created=record.created_at,
        )

    @asynccontextmanager
    async def _stoppable(self, record: BatchRecord) -> AsyncIterator[ItemInference]:
        """Yields the inference of the items. It is stopped by ``cancel`` or at the end of the completion window."""
        inference = self._inference = ItemInference(self._models, record.endpoint, record.models)
        if self.cancelled.is_set():
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

    async def _written(self, items: int, failed: int) -> None:
        """Records how many items are in parts. This is also where the process notices that another process has
        cancelled the batch.
        """
        record = await self._change(lambda batch: replace(batch, completed=items - failed, failed=failed))
        if record.status == "cancelling":
            self.cancel()

    async def _finish(self) -> None:
        places = self._places
        parts = places.open_run(self.id)
        async with WriterLease(parts, 1, 1, places.retry):
            record = await self._change(_finalizing)
            if record.ended:
                return  # another process has ended the batch
            missing = partial(self._missing, record)
            answered, failed = await write_output_files(self.id, parts, places.files, places.retry, missing)
            record = await self._change(lambda batch: _finished(batch, answered, failed))
        logger.info("Batch %s: %s, %d of %d items failed", self.id, record.status, record.failed, record.total)
        with suppress(ObjectMissing):
            await parts.delete([info.key async for info in parts.list()])

    async def _missing(self, record: BatchRecord, begin: int) -> AsyncGenerator[bytes, None]:
        """Yields the output lines from number ``begin`` on, which are not in any part because the batch was stopped.

        They are not written as parts of 16 items, because this would take minutes.
        """
        if begin >= record.total:
            return
        why = CANCELLED if record.status == "cancelling" else EXPIRED
        identity = identify(self._cloud_run(record).config(), record.created_at)
        lines: list[bytes] = []
        source = await self._source(record)
        async with aclosing(source.rows(wanted=lambda index: index >= begin)) as items:
            async for item in items:
                lines.append(Result(item, Outcome(failure=item.failure or why)).encode(identity))
                if len(lines) == _BLOCK_ITEMS:
                    yield b"".join(lines)
                    lines.clear()
        yield b"".join(lines)


async def first_of(*waits: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result, or raises the error, of the coroutine that ends first, and cancels the others.

    If several coroutines end at the same time, the one that comes first in the arguments counts.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _finalizing(batch: BatchRecord) -> BatchRecord:
    return batch.moved("finalizing") if batch.status == "in_progress" else batch


def _finished(batch: BatchRecord, answered: OutputFile, failed: OutputFile) -> BatchRecord:
    expired = EXPIRED.code in failed.codes
    return batch.moved(
        "cancelled" if batch.status == "cancelling" else "expired" if expired else "completed",
        completed=answered.items,
        failed=failed.items,
        output_file_id=answered.file_id,
        error_file_id=failed.file_id,
    )
