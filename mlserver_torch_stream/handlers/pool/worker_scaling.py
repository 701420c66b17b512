"""Scales the workers of a model: adds one while requests wait and no worker is free, removes one that stays idle.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.handlers.pool.batch_queue import BatchQueue
from mlserver_torch_stream.handlers.pool.supervisor import WorkerRemoved, WorkerSlot, WorkerSupervisor
from mlserver_torch_stream.log_text import log_text

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0  # after a failed attempt to add a worker
_LEAST_PAUSE_S = 0.01  # between two checks of the same waiting request
NO_WORKER = "it has no worker to serve inference request. Please use scale workers API to add workers."


class WorkerScaling:
    """Keeps between ``least`` and ``most`` workers; ``scale`` changes the two numbers.

    One worker at a time is started for waiting requests. ``free`` returns whether a worker may take a request now.
    ``failed`` is called with the reason if no worker is left and none can be started.
    """

    def __init__(
        self,
        config: HandlerConfig,
        supervisor: WorkerSupervisor,
        queue: BatchQueue,
        free: Callable[[WorkerSlot], bool],
        failed: Callable[[str], None],
    ) -> None:
        self.least, self.most = config.minWorkers, config.most_workers
        self._up_after_s, self._down_after_s = config.scaleUpAfterMSec / 1000, config.scaleDownAfterMSec / 1000
        self._batch_s = config.maxBatchDelay / 1000
        self._supervisor = supervisor
        self._queue = queue
        self._free = free
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._growing: asyncio.Task[None] | None = None
        self._grow_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = 0.0

    # --- more workers ---

    def requests_wait(self) -> None:
        """Called after requests were sent to all workers that had room for them."""
        if self._may_grow and self._grow_timer is None and (since := self._queue.waiting_since) is not None:
            self._look_at(self._due(since))

    def refused_for_room(self) -> None:
        """Called when a request was refused because no worker was free (``useJobTicket``), which shows that another
        worker is needed, although no request waits.
        """
        if self._may_grow and time.monotonic() >= self._paused_until:
            self._grow()

    @property
    def _may_grow(self) -> bool:
        return self._growing is None and len(self._supervisor.staying) < self.most

    def _due(self, since: float) -> float:
        """Returns when a worker is added for a request that has waited since ``since``: at once if the model has no
        worker.
        """
        return max(since + (self._up_after_s if self._supervisor.staying else 0.0), self._paused_until)

    def _look_at(self, when: float) -> None:
        self._grow_timer = self._loop.call_later(max(0.0, when - time.monotonic()), self._look)

    def _look(self) -> None:
        self._grow_timer = None
        since = self._queue.waiting_since
        if since is None or not self._may_grow or self._supervisor.ended:
            return
        now, due = time.monotonic(), self._due(since)
        if due > now:
            self._look_at(due)
        elif any(map(self._free, self._supervisor.ready)):  # the request only waits until its batch is due
            self._look_at(now + max(self._up_after_s, _LEAST_PAUSE_S))
        else:
            self._grow()

    def _grow(self) -> None:
        self._growing = self._loop.create_task(self._start_one())

    async def _start_one(self) -> None:
        try:
            await self._supervisor.add(1)
        except LoadFailed as error:
            if isinstance(error, WorkerRemoved) or self._supervisor.ended:
                return
            logger.error("Cannot start another worker for the waiting requests: %s", log_text(error))
            self._paused_until = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * 2, _MAX_PAUSE_S)
            if not self._supervisor.staying:
                self._failed(f"no worker can be started: {error}")
        else:
            self._pause_s = _FIRST_PAUSE_S
        finally:
            self._growing = None
        self.requests_wait()

    # --- fewer workers ---

    def became_idle(self, slot: WorkerSlot) -> None:
        """Called when a worker has ended its last request."""
        if slot.leaving:
            self._end_if_done(slot)
        elif self._idle_timer is None and len(self._ready_to_stay) > self.least:
            self._idle_timer = self._loop.call_later(self._down_after_s, self._end_idle)

    @property
    def _ready_to_stay(self) -> list[WorkerSlot]:
        return [slot for slot in self._supervisor.staying if slot.ready]

    def _end_idle(self) -> None:
        """Ends the workers that have been idle for long enough, the highest numbers first."""
        self._idle_timer = None
        if self._supervisor.ended:
            return
        now, again = time.monotonic(), math.inf
        for slot in reversed(self._supervisor.ready):
            if slot.leaving or slot.active or len(self._ready_to_stay) <= self.least:
                continue
            until = max(slot.idle_since + self._down_after_s, self._queue.held_until(slot.number, now) or 0.0)
            if until <= now:
                self._supervisor.remove(slot)
            else:
                again = min(again, until)
        if again < math.inf:
            self._idle_timer = self._loop.call_later(max(again - now, _LEAST_PAUSE_S), self._end_idle)

    # --- by order ---

    async def scale(self, least: int, most: int, grace: float | None = None) -> None:
        """Sets both numbers. Returns when ``least`` workers are ready and the workers above ``most`` have ended.

        A worker that is scaled away finishes its requests. If ``grace`` is not None, the worker is ended after that
        many seconds, with the requests that it still has. If no worker stays, the leaving workers also take the waiting
        requests. Raises LoadFailed if a worker cannot be started, and leaves both numbers unchanged.
        """
        before = self.least, self.most
        self._set(least, most)
        surplus = sorted(self._supervisor.staying, key=lambda slot: (slot.ready, len(slot.active), -slot.number))
        surplus = surplus[: max(0, len(surplus) - most)]
        self._let_go(surplus, grace)
        known = list(self._supervisor.slots)
        missing = least - len(self._supervisor.staying)
        try:
            await self._supervisor.add(max(0, missing))
        except WorkerRemoved:
            raise
        except LoadFailed:
            if (self.least, self.most) == (least, most):  # else another order has changed them
                self._set(*before)
                self._let_go([slot for slot in self._supervisor.staying if slot not in known])
            raise
        self.requests_wait()
        starting = [slot.starting for slot in self._supervisor.staying if slot.starting is not None]
        if starting:  # an earlier order started them
            await asyncio.wait(starting)
        for slot in surplus:
            await slot.gone.wait()

    def _set(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._queue.most_workers = most

    def _let_go(self, surplus: Sequence[WorkerSlot], grace: float | None = None) -> None:
        for slot in surplus:
            slot.leaving = True
            if grace is not None:
                self._loop.call_later(grace, self._end_now, slot, f"{grace:g} s after it was scaled away")
            self._end_if_done(slot)
        self._queue.leaving = {slot.number for slot in self._supervisor.ready if slot.leaving and self.most}

    def _end_now(self, slot: WorkerSlot, when: str) -> None:
        if not slot.removed:
            self._supervisor.kill(slot, f"worker {slot.number} was ended {when}")

    def _end_if_done(self, slot: WorkerSlot) -> None:
        """Ends a worker that is being scaled away, if it has no requests and holds no sequences."""
        if slot.removed or slot.active:
            return
        now = time.monotonic()
        held_until = self._queue.held_until(slot.number, now) or 0.0
        if not self.most and self._queue.waiting_since is not None:  # a request still waits for its batch
            held_until = max(held_until, now + self._batch_s)
        if not slot.ready or held_until <= now:
            self._queue.worker_lost(slot.number)
            self._supervisor.remove(slot)
        elif held_until < math.inf:
            self._loop.call_later(max(held_until - now, _LEAST_PAUSE_S), self._end_if_done, slot)
