"""Ends a worker whose handler is silent for longer than ``responseTimeout``; an async task is cancelled alone.

Knows nothing of batches. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mlserver_torch_stream.errors import TimedOut
from mlserver_torch_stream.torchserve.config import HandlerConfig
from mlserver_torch_stream.torchserve.handler_request import HandlerJob
from mlserver_torch_stream.torchserve.supervisor import WorkerSlot, WorkerSupervisor


class ResponseTimeout:
    """A busy worker has one timer, which is set anew at each check."""

    def __init__(
        self, config: HandlerConfig, supervisor: WorkerSupervisor, cancel: Callable[[HandlerJob], None]
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()

    def watch(self, slot: WorkerSlot) -> None:
        """Called when a worker gets its first request. Idempotent."""
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
            paused = any(job.drained is not None for job in slot.active.values())
            oldest = now if paused else slot.active_at
        if now - oldest >= limit:
            for job in slot.begun:
                job.fail(_silent(limit))
            self._supervisor.kill(slot, f"worker {slot.number} sent nothing for {limit} s and was ended")
        else:
            self._check_in(slot, oldest + limit - now)

    def _time_out_silent(self, slot: WorkerSlot, now: float, limit: int) -> float:
        """Cancels each task that is silent for too long. Returns the time that decides whether the worker hangs."""
        for job in list(slot.active.values()):
            if not job.over and now - job.active_at >= limit:
                job.active_at = now  # the task has as long again to end
                job.fail(_silent(limit))
                self._cancel(job)
        return min(job.active_at for job in slot.active.values())


def _silent(limit: int) -> TimedOut:
    return TimedOut(f"the handler sent nothing for {limit} s (responseTimeout)")
