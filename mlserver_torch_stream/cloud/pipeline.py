"""Runs the stages between rows and results: forms batches, infers them concurrently, delivers results in order.

Knows neither the source of the rows nor the sink of the results. Its tasks live until the reader closes the results.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from mlserver_torch_stream.cloud.chunk_join import ChunkJoin
from mlserver_torch_stream.cloud.cloud_errors import CloudError
from mlserver_torch_stream.cloud.row_batcher import RowBatcher
from mlserver_torch_stream.cloud.rows import Failure, Infer, Outcome, Result, Row
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.window import Window


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """``window``: the most rows that are read and not delivered; ``window_bytes``: the most bytes of their input;
    ``batches``: the most batches that are inferred at a time; ``batch_weight``: the most that the rows of a batch
    weigh, in bytes unless ``weigh`` says otherwise; ``max_wait``: seconds that a batch's first row waits."""

    window: int = 256
    window_bytes: int = 128 * 2**20
    batch_rows: int = 16
    batch_weight: int = 16 * 2**20
    max_wait: float = 0.05
    batches: int = 4


_Ticketed = tuple[int, Row]


def _size(row: Row) -> int:
    return row.size


def _inference_failed(error: Exception, shared: bool = False) -> Failure:
    return Failure("inference_failed", f"{type(error).__name__}: {error}", shared=shared)


async def infer_rows(
    rows: AsyncGenerator[Row, None],
    infer: Infer,
    limits: PipelineLimits = PipelineLimits(),
    metrics: RunMetrics | None = None,
    weigh: Callable[[Row], int] = _size,
) -> AsyncGenerator[Result, None]:
    """Yields one result for each row, in the order of the rows, as soon as all rows before it have a result; one for
    all joined chunks of an object.

    Raises the CloudError of the source or of ``infer`` after the results of the rows before it.
    """
    flow = _Flow(infer, limits, metrics or RunMetrics(), weigh)
    feeder = asyncio.create_task(flow.feed(rows))
    try:
        async for result in flow.results():
            yield result
    finally:
        feeder.cancel()
        await flow.stop()
        with suppress(asyncio.CancelledError, Exception):
            await feeder


class _Flow:
    """The state of one run of the stages. Every method runs on the event loop's thread."""

    def __init__(self, infer: Infer, limits: PipelineLimits, metrics: RunMetrics, weigh: Callable[[Row], int]) -> None:
        self._infer = infer
        self._limits = limits
        self._metrics = metrics
        self._window: Window[Result] = Window(limits.window, limits.window_bytes)
        self._batcher: RowBatcher[_Ticketed] = RowBatcher(
            limits.batch_rows, limits.batch_weight, limits.max_wait, lambda item: max(1, weigh(item[1]))
        )
        self._join = ChunkJoin()
        self._waiting: deque[Sequence[_Ticketed]] = deque()  # at most the window's rows
        self._suspects: deque[_Ticketed] = deque()  # rows of batches that failed
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()  # an item has left the window
        self._settled = asyncio.Event()  # a result or an error has arrived, for which the reader may wait
        self._fed = False
        self._source_error: Exception | None = None  # raised once the rows before it are delivered
        self._error: BaseException | None = None

    async def feed(self, rows: AsyncGenerator[Row, None]) -> None:
        try:
            async with aclosing(rows) as source:
                async for row in source:
                    await self._room(row.size)
                    self._take(row)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._source_error = error
        self._send(self._batcher.flush())
        self._fed = True
        self._settled.set()

    async def _room(self, size: int) -> None:
        while not self._window.room(size):
            if not self._running and not self._waiting:
                self._send(self._batcher.flush())  # this batch cannot grow, and only its end makes room
            self._left.clear()
            await self._left.wait()

    def _take(self, row: Row) -> None:
        ticket = self._window.enter(row.size)
        self._metrics.peak_undelivered = max(self._metrics.peak_undelivered, self._window.peak)
        self._metrics.peak_undelivered_bytes = max(self._metrics.peak_undelivered_bytes, self._window.peak_weight)
        if row.failure is not None:
            self._settle(ticket, row, Outcome(failure=row.failure))
            return
        try:
            full = self._batcher.add((ticket, row), time.monotonic())
        except Exception as error:  # the caller's ``weigh`` may raise anything
            self._settle(ticket, row, Outcome(failure=_inference_failed(error)))
            return
        for batch in full:
            self._send(batch)
        self._arm()

    def _arm(self) -> None:
        """Sets the timer that sends the open batch when its first row has waited ``max_wait`` seconds."""
        if self._timer is None and self._batcher.deadline is not None:
            delay = max(0.0, self._batcher.deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._due)

    def _due(self) -> None:
        self._timer = None
        self._send(self._batcher.due(time.monotonic()))
        self._arm()

    def _send(self, batch: Sequence[_Ticketed]) -> None:
        if batch:
            self._waiting.append(batch)
        while self._error is None:
            if self._suspects and not self._running:
                self._start([self._suspects.popleft()], by_itself=True)
            elif self._waiting and not self._suspects and len(self._running) < self._limits.batches:
                self._start(self._waiting.popleft())
            else:
                return

    def _start(self, batch: Sequence[_Ticketed], by_itself: bool = False) -> None:
        task = asyncio.create_task(self._run(batch, by_itself))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self._fail(CloudError("the inference of a batch was cancelled"))  # ``stop`` sets the error first
        elif (error := task.exception()) is not None:
            self._fail(error)
        self._send(())

    async def _run(self, batch: Sequence[_Ticketed], by_itself: bool) -> None:
        """Settles the rows of a batch. Rows that another row of the batch may have failed are inferred once more, each
        while no other batch is: a model may put the rows of several batches together."""
        rows = [row for _, row in batch]
        began = time.monotonic()
        try:
            outcomes = await self._infer(rows)
            if len(outcomes) != len(rows):
                raise RuntimeError(f"{len(outcomes)} outcomes came for {len(rows)} rows")
        except CloudError:
            self._metrics.batch_failed()
            raise
        except Exception as error:
            self._metrics.batch_failed()
            outcomes = [Outcome(failure=_inference_failed(error, shared=len(rows) > 1))] * len(rows)
        else:
            self._metrics.batch_inferred(rows, outcomes, began, time.monotonic())
        for (ticket, row), outcome in zip(batch, outcomes, strict=True):
            if outcome.failure is not None and outcome.failure.shared and not by_itself:
                self._suspects.append((ticket, row))
            else:
                self._settle(ticket, row, outcome)

    def _settle(self, ticket: int, row: Row, outcome: Outcome) -> None:
        self._window.settle(ticket, Result(row, outcome))
        self._settled.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._settled.set()

    async def results(self) -> AsyncGenerator[Result, None]:
        while True:
            while self._window.ready:
                result = self._join.add(self._window.leave())
                self._left.set()
                if result is None:
                    continue
                self._metrics.delivered(result.row, result.outcome)
                yield result
            if self._error is not None:
                raise self._error
            if self._fed and not len(self._window):
                if self._source_error is not None:
                    raise self._source_error
                return
            self._settled.clear()
            await self._settled.wait()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._fail(asyncio.CancelledError())  # no further batch starts
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
