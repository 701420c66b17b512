"""Sends batches to a model's workers when they are due, and ends workers that answer too late.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from mlserver_torch_stream.errors import TimedOut
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.handlers.pool.batch_queue import BatchQueue
from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetrics
from mlserver_torch_stream.handlers.pool.handler_request import HandlerJob
from mlserver_torch_stream.handlers.pool.supervisor import WorkerSlot, WorkerSupervisor
from mlserver_torch_stream.handlers.pool.worker_process import batch_frame

# A worker gets further batches while it runs one, so that it need not wait for the event loop between two batches: as
# many as it runs within _AHEAD_S seconds, judged by the duration of its latest batch.
_AHEAD_S, _MAX_AHEAD = 0.005, 16


class BatchDispatcher:
    """Sends requests from the queue to the workers. ``watch`` is called when an idle worker gets a batch.

    If ``joins`` is true, a request joins the requests that a worker already runs, as in continuous batching.
    """

    def __init__(
        self,
        config: HandlerConfig,
        queue: BatchQueue,
        supervisor: WorkerSupervisor,
        metrics: HandlerMetrics,
        watch: Callable[[WorkerSlot], None],
    ) -> None:
        self.joins = config.continuousBatching or config.asyncCommunication
        self._sends_ahead = config.stops == "alone" and not config.useJobTicket
        self._config = config
        self._queue = queue
        self._supervisor = supervisor
        self._metrics = metrics
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next_due = math.inf  # when the timer runs

    def dispatch_due(self) -> None:
        """Sends a batch to every worker that has room and whose next batch is due."""
        now, next_due = time.monotonic(), math.inf
        slots = self._supervisor.ready
        for slot in sorted(slots, key=lambda each: len(each.active)) if len(slots) > 1 else slots:
            while self._room(slot) > 0:
                due = self._queue.due(slot.number, slot.idle_since, now)
                if due is None:
                    break
                if due > now and not self.joins:
                    next_due = min(next_due, due)
                    break
                self._dispatch(slot, now, self._room(slot))
            while self._queue.is_full(slot.number) and 0 < len(slot.batches) <= self._most_ahead(slot):
                self._queue.ahead += self._dispatch(slot, now, self._config.batchSize)
        if next_due != self._next_due:
            self._set_timer(next_due, now)

    def _set_timer(self, due: float, now: float) -> None:
        """Makes the timer dispatch at ``due``. While a batch gathers, its further requests leave the timer as it is."""
        self._next_due = due
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(due - now, self._dispatch_later) if due < math.inf else None

    def _dispatch_later(self) -> None:
        self._next_due, self._timer = math.inf, None
        self.dispatch_due()

    def next_batch(self, slot: WorkerSlot, took: float) -> None:
        """Called when a worker has ended a batch, for which its handler needed ``took`` seconds.

        ``took`` is 0 if the handler got none of the batch's requests, because their clients had disconnected.
        """
        if slot.batches:
            slot.batches.popleft()
            slot.batch_s = took or slot.batch_s
        if slot.batches:
            self._queue.ahead -= len(slot.batches[0])
            for job in slot.batches[0]:
                job.begin(time.monotonic())
        self.dispatch_due()

    def idle(self) -> list[int]:
        """Returns the numbers of the workers that are gathering their next batch; none if requests join running
        batches.
        """
        return [] if self.joins else [slot.number for slot in self._supervisor.ready if not slot.active]

    def has_room(self, slot: WorkerSlot) -> bool:
        """Whether the worker could take another request, whether or not one waits."""
        return not slot.leaving and self._room(slot) > 0

    def is_free(self, slot: WorkerSlot) -> bool:
        """Whether a waiting request may go to this worker now."""
        due = self._queue.due(slot.number, slot.idle_since, time.monotonic())
        return due is not None and self._room(slot) > 0

    def _room(self, slot: WorkerSlot) -> int:
        if self._config.asyncCommunication:
            return self._config.queue_size - len(slot.active)
        if self._config.continuousBatching:
            return self._config.batchSize - len(slot.active)
        return 0 if slot.active else self._config.batchSize

    def _most_ahead(self, slot: WorkerSlot) -> int:
        """Returns how many batches the worker may hold in addition to the batch that it runs.

        Returns 0 if another worker might run a batch earlier, or if a request would run although its client has
        disconnected.
        """
        if not self._sends_ahead or not slot.batches or not slot.batch_s:
            return 0
        if not self._queue.most_workers == len(self._supervisor.slots) == 1:
            return 0
        return min(_MAX_AHEAD, int(_AHEAD_S / slot.batch_s))

    def _dispatch(self, slot: WorkerSlot, now: float, room: int) -> int:
        """Sends a batch to a worker. Returns the number of its requests."""
        batch = self._queue.take(slot.number, room)
        if not slot.active:
            slot.active_at = now
            self._watch(slot)
        begins = not slot.batches
        if not self.joins:
            slot.batches.append(batch)
        for job in batch:
            if begins:
                job.begin(now)
            job.alone |= len(batch) == 1 or self.joins
            slot.active[job.key] = job
        self._metrics.batches += 1
        self._metrics.batched_requests += len(batch)
        assert slot.worker is not None
        slot.worker.send(*batch_frame(batch), all_ranks=self._config.broadcasts)
        return len(batch)


class ResponseTimeout:
    """Ends a worker that sends nothing for ``responseTimeout`` seconds. Each busy worker has one timer."""

    def __init__(
        self, config: HandlerConfig, supervisor: WorkerSupervisor, cancel: Callable[[HandlerJob], None]
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()

    def watch(self, slot: WorkerSlot) -> None:
        """Starts the timer of a worker that gets its first request. Idempotent."""
        if slot.timer is None:
            self._check_in(slot, self._config.responseTimeout)

    def _check_in(self, slot: WorkerSlot, seconds: float) -> None:
        slot.timer = self._loop.call_later(seconds, self._check, slot)

    def _check(self, slot: WorkerSlot) -> None:
        slot.timer = None
        if not slot.active:
            return
        limit = self._config.responseTimeout
        now = time.monotonic()
        if self._config.asyncCommunication:
            oldest = self._time_out_silent(slot, now, limit)
        else:
            paused = any(job.stream.drained is not None for job in slot.active.values())
            oldest = now if paused else slot.active_at
        if now - oldest >= limit:
            for job in slot.begun:
                job.stream.fail(_silent(limit))
            self._supervisor.kill(slot, f"worker {slot.number} sent nothing for {limit} s and was ended")
        else:
            self._check_in(slot, oldest + limit - now)

    def _time_out_silent(self, slot: WorkerSlot, now: float, limit: int) -> float:
        """Cancels each job that has been silent for ``limit`` seconds.

        Returns the time of the last piece of the job that has been silent longest.
        """
        for job in list(slot.active.values()):
            if not job.stream.over and now - job.active_at >= limit:
                job.active_at = now  # the cancelled task gets the same time again to end
                job.stream.fail(_silent(limit))
                self._cancel(job)
        return min(job.active_at for job in slot.active.values())


def _silent(limit: int) -> TimedOut:
    return TimedOut(f"the handler sent nothing for {limit} s (responseTimeout)")
