"""Runs the stages between rows and results: forms batches, infers them concurrently, delivers results in order.

The tasks live until the reader closes the results. The bounds apply to the rows that have entered and are not delivered
yet, so that the number and the weight of rows that wait for a slow row are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlserver_torch_stream.cloud.parse import ChunkJoin
from mlserver_torch_stream.cloud.rows import CloudError, Failure, Infer, Outcome, Result, Row, Weigh
from mlserver_torch_stream.cloud.run_metrics import RunMetrics

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    weight: int
    ready: bool = False
    value: T | None = None


class Window(Generic[T]):
    """Holds at most ``limit`` undelivered items, whose total weight is at most ``most_weight``. An empty window accepts
    a heavier item.

    ``peak`` and ``peak_weight`` are the largest number and weight so far.
    """

    def __init__(self, limit: int, most_weight: int) -> None:
        if limit < 1 or most_weight < 1:
            raise ValueError("limit and most_weight must be at least 1")
        self.limit = limit
        self.most_weight = most_weight
        self.peak = 0
        self.peak_weight = 0
        self._weight = 0
        self._first = 0
        self._slots: deque[_Slot[T]] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def room(self, weight: int) -> bool:
        """Returns whether an item of this weight may enter. An empty window accepts an item of any weight."""
        if not self._slots:
            return True
        return len(self._slots) < self.limit and self._weight + weight <= self.most_weight

    def enter(self, weight: int) -> int:
        """Lets the next item in and returns its ticket."""
        assert self.room(weight), "the window is full"
        self._slots.append(_Slot(weight))
        self._weight += weight
        self.peak = max(self.peak, len(self._slots))
        self.peak_weight = max(self.peak_weight, self._weight)
        return self._first + len(self._slots) - 1

    def settle(self, ticket: int, value: T) -> None:
        """Stores the result of the item with this ticket; an item has one result."""
        slot = self._slots[ticket - self._first]
        assert not slot.ready, "the item already has a result"
        slot.ready, slot.value = True, value

    @property
    def ready(self) -> bool:
        """True if the first item has a result and can leave."""
        return bool(self._slots) and self._slots[0].ready

    def leave(self) -> T:
        """Removes the first item and returns its result."""
        assert self.ready, "the first item has no result yet"
        self._first += 1
        slot = self._slots.popleft()
        self._weight -= slot.weight
        return slot.value  # type: ignore[return-value]


class RowBatcher(Generic[T]):
    """Forms batches of at most ``most_items`` items and at most ``most_weight`` total weight; a single item may weigh
    more.

    A batch is sent at the latest ``max_wait`` seconds after its first item, even if it is not full.
    """

    def __init__(self, most_items: int, most_weight: int, max_wait: float, weigh: Callable[[T], int]) -> None:
        if most_items < 1 or most_weight < 1 or max_wait < 0:
            raise ValueError("most_items and most_weight must be at least 1, and max_wait must not be negative")
        self._most_items = most_items
        self._most_weight = most_weight
        self._max_wait = max_wait
        self._weigh = weigh
        self._items: list[T] = []
        self._weight = 0
        # The time from which ``due`` returns the open batch; None while no item waits.
        self.deadline: float | None = None

    def add(self, item: T, now: float) -> list[Sequence[T]]:
        """Adds an item.

        Returns the batches that are full now: none, one, or two if a heavy item follows lighter ones.
        """
        full = []
        weight = self._weigh(item)
        if self._items and self._weight + weight > self._most_weight:
            full.append(self.flush())
        if not self._items:
            self.deadline = now + self._max_wait
        self._items.append(item)
        self._weight += weight
        if len(self._items) >= self._most_items or self._weight >= self._most_weight:
            full.append(self.flush())
        return full

    def due(self, now: float) -> Sequence[T]:
        """Returns the open batch if its first item has waited ``max_wait`` seconds, otherwise an empty batch."""
        return self.flush() if self.deadline is not None and now >= self.deadline else []

    def flush(self) -> Sequence[T]:
        items, self._items, self._weight, self.deadline = self._items, [], 0, None
        return items


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """The bounds of the stages.

    ``window`` is the maximum number of rows that have been read and not yet delivered; ``window_bytes`` is the maximum
    number of bytes of their input; ``batches`` is the maximum number of batches that are inferred at a time;
    ``batch_weight`` is the largest weight of a batch, in bytes unless ``weigh`` says otherwise; ``max_wait`` says how
    many seconds the first row of a batch waits.
    """

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
    weigh: Weigh = _size,
) -> AsyncGenerator[Result, None]:
    """Yields one result for each row, in the order of the rows, as soon as all rows before it have a result.

    If the chunks of an object are joined, they have one common result. Raises the CloudError of the source or of
    ``infer`` after the results of the rows before it.
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

    def __init__(self, infer: Infer, limits: PipelineLimits, metrics: RunMetrics, weigh: Weigh) -> None:
        self._infer = infer
        self._limits = limits
        self._metrics = metrics
        self._window: Window[Result] = Window(limits.window, limits.window_bytes)
        self._batcher: RowBatcher[_Ticketed] = RowBatcher(
            limits.batch_rows, limits.batch_weight, limits.max_wait, lambda item: self._weight
        )
        self._weigh = weigh
        self._weight = 1  # the weight of the row that is being added
        self._join = ChunkJoin()
        self._waiting: deque[Sequence[_Ticketed]] = deque()  # at most the window's rows
        self._suspects: deque[_Ticketed] = deque()  # rows of batches that failed
        self._running: set[asyncio.Task[None]] = set()
        self._alone = False  # a suspect runs
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
                    await self._take(row)
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

    async def _take(self, row: Row) -> None:
        ticket = self._window.enter(row.size)
        self._metrics.peak_undelivered = max(self._metrics.peak_undelivered, self._window.peak)
        self._metrics.peak_undelivered_bytes = max(self._metrics.peak_undelivered_bytes, self._window.peak_weight)
        if row.failure is not None:
            self._settle(ticket, row, Outcome(failure=row.failure))
            return
        try:
            weight = self._weigh(row)
            self._weight = max(1, weight if isinstance(weight, int) else await weight)
        except CloudError:
            raise
        except Exception as error:  # the caller's ``weigh`` may raise anything
            self._settle(ticket, row, Outcome(failure=_inference_failed(error)))
            return
        for batch in self._batcher.add((ticket, row), time.monotonic()):
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
            elif self._waiting and not (self._suspects or self._alone) and len(self._running) < self._limits.batches:
                self._start(self._waiting.popleft())
            else:
                return

    def _start(self, batch: Sequence[_Ticketed], by_itself: bool = False) -> None:
        task = asyncio.create_task(self._run(batch, by_itself))
        self._running.add(task)
        self._alone = by_itself
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._alone = False
        if task.cancelled():
            self._fail(CloudError("the inference of a batch was cancelled"))  # ``stop`` sets the error first
        elif (error := task.exception()) is not None:
            self._fail(error)
        self._send(())

    async def _run(self, batch: Sequence[_Ticketed], by_itself: bool) -> None:
        """Settles the rows of a batch. If a row fails and another row may have caused this, the row is inferred once
        more.

        The row then runs alone, because a model may combine the rows of several batches.
        """
        rows = [row for _, row in batch]
        began = time.monotonic()
        try:
            outcomes = await self._infer(rows)
            if len(outcomes) != len(rows):
                raise RuntimeError(f"the model returned {len(outcomes)} outcomes for {len(rows)} rows")
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
