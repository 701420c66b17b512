"""Runs new batches, and unfinished batches of an earlier process, a few at a time.

If the store fails, the batch is tried again; the items that have been delivered are kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.batches.batch_record import BatchProblem, BatchRecord, IdMaker
from mlserver_torch_stream.cloud.batches.batch_run import BatchModels, BatchRun, first_of
from mlserver_torch_stream.cloud.batches.batch_store import BatchPlaces, NoSuchObject
from mlserver_torch_stream.cloud.rows import CloudError, InUse, RunRefused
from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull
from mlserver_torch_stream.protocol.openai_batch_models import BATCH, PURPOSE, BatchRequest

logger = logging.getLogger(__name__)

MAX_UNFINISHED = 100  # batches that have not ended; further ones are refused
_AT_ONCE = 4
_PAUSES = Retry(first=1.0, longest=60.0)
_IN_USE_S = 15.0  # between two checks of a batch that another process is running, or was running when it died


class BatchRunner:
    """Runs the batches of one store.

    All methods run on the event loop's thread, and raise RequestError or CloudError.
    """

    def __init__(self, places: BatchPlaces, models: BatchModels, ids: IdMaker) -> None:
        self.places = places
        self._models = models
        self._ids = ids
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False

    async def serve(self) -> None:
        """Resumes the batches that an earlier process left, and runs batches until it is cancelled."""
        self._open = True
        try:
            await self._resume()
            await asyncio.Event().wait()
        finally:
            self._open = False
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def create(self, request: BatchRequest) -> BatchRecord:
        """Stores a new batch and starts it. Raises RequestError if the batch cannot be started."""
        if not self._open:
            raise NotServing("the server is shutting down")
        if len(self._runs) >= MAX_UNFINISHED:
            raise QueueFull(f"{len(self._runs)} batches have not ended; at most {MAX_UNFINISHED} are allowed", 60)
        await self._check_input(request.input_file_id)
        made = self._ids.make(BATCH)
        record = BatchRecord(made, request.input_file_id, request.endpoint, int(time.time()), request.metadata)
        await self.places.batches.put(record.id, record.dumps())
        self._begin(record)
        return record

    async def _check_input(self, file_id: str) -> None:
        try:
            file = await self.places.files.get(file_id)
        except NoSuchObject:
            raise InvalidInput("input_file_id", f"no file has the id {file_id}") from None
        if file["purpose"] != PURPOSE:
            raise InvalidInput("input_file_id", f"the file's purpose must be {PURPOSE!r}, got {file['purpose']!r}")

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Cancels a batch. Raises NoSuchObject, or InvalidInput for a batch that has ended."""
        await self.places.batches.get(batch_id)
        record = await self.places.batches.change(batch_id, _cancelling)
        if record.status != "cancelling":
            raise InvalidInput("batch_id", f"a batch that is {record.status} cannot be cancelled")
        self._begin(record)
        if batch_id in self._runs:
            self._runs[batch_id].cancel()
        return record

    async def reader(self, file_id: str) -> str | None:
        """Returns the id of an unfinished batch that reads this file; None if no such batch exists.

        A batch has ended if its record says so; the run in this process ends a little later.
        """
        for batch_id in [run.id for run in self._runs.values() if run.input_file_id == file_id]:
            if not (await self.places.batches.get(batch_id)).ended:
                return batch_id
        return None

    def _begin(self, record: BatchRecord) -> None:
        if record.id in self._runs or not self._open:
            return
        run = self._runs[record.id] = BatchRun(record, self.places, self._models)
        if record.status == "cancelling":
            run.cancel()
        task = asyncio.create_task(self._to_its_end(run))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(run.id, task))

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._runs.pop(batch_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Batch %s was given up", batch_id, exc_info=error)

    async def _resume(self) -> None:
        failed = 0
        while True:
            try:
                for batch_id in await self.places.batches.ids():
                    await self._take_up(batch_id)
                return
            except CloudError as error:
                failed += 1
                await self._pause("The batches of an earlier process", error, failed)

    async def _take_up(self, batch_id: str) -> None:
        try:
            record = await self.places.batches.get(batch_id)
        except (RunRefused, NoSuchObject) as error:
            logger.error("Batch %s: %s", batch_id, error.message)
            return
        if not record.ended:
            self._begin(record)

    async def _to_its_end(self, run: BatchRun) -> None:
        failed = 0
        while True:
            try:
                async with self._turn(run):
                    await run.run()
                return
            except InUse:
                await asyncio.sleep(_IN_USE_S)
            except RunRefused as error:
                logger.error("Batch %s failed: %s", run.id, error.message)
                await run.fail(BatchProblem(error.code, "the batch cannot continue; the server's log says why"))
                return
            except CloudError as error:
                failed += 1
                await self._pause(f"Batch {run.id}", error, failed)
            except Exception:
                logger.exception("Batch %s failed", run.id)
                await run.fail(BatchProblem("server_error", "the server failed during this batch; its log says why"))
                return

    @asynccontextmanager
    async def _turn(self, run: BatchRun) -> AsyncIterator[None]:
        """Waits for a free turn and keeps it until the block ends. A cancelled batch does not wait, because none of its
        items is answered.
        """
        turn = asyncio.Event()

        async def take() -> None:
            await self._turns.acquire()
            turn.set()

        try:
            await first_of(take(), run.cancelled.wait())
            yield
        finally:
            if turn.is_set():
                self._turns.release()

    async def _pause(self, what: str, error: CloudError, failed: int) -> None:
        seconds = _PAUSES.pause(min(failed, 8), error)
        logger.warning("%s: trying again in %.0f s: %s", what, seconds, error.message)
        await asyncio.sleep(seconds)


def _cancelling(batch: BatchRecord) -> BatchRecord:
    return batch.moved("cancelling") if batch.status in ("validating", "in_progress") else batch
