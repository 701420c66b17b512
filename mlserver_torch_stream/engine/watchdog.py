"""Sees to what the engine's thread owes its clients while that does not come back from a step.

Knows nothing of backends: it is told what the thread is at, and asks it before it does without it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlserver_torch_stream.engine.client_messages import StepTimeout
from mlserver_torch_stream.engine.event_delivery import end_for_readers
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.scheduling.queue_limits import FAR, Deadlines, QueueLimits
from mlserver_torch_stream.engine.step_progress import Work
from mlserver_torch_stream.errors import TimedOut
from mlserver_torch_stream.types import FinishReason

logger = logging.getLogger(__name__)

# Seconds for the engine's thread to end a request itself, with the text that it holds back. Most steps are shorter.
PATIENCE = 0.5
_LEAST = 0.01  # seconds between two looks, whatever was set


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Jobs that are to end, as the engine's thread was asked at that time."""

    requests: tuple[RequestState, ...]
    reason: FinishReason
    error: Exception
    asked_at: float


@dataclass(frozen=True, slots=True)
class PendingDeath:
    """What the engine's thread is to die of, and until when it is waited for; None: as long as it takes."""

    error: BaseException
    until: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """``ask``: the engine's thread is to end these. ``without``: it was asked and has not, so they end without it.

    ``overdue``: work of which that is to be said, once. ``lost``: why the thread is given up. ``seconds``: until there
    can be something new to decide.
    """

    ask: Sequence[EndRequest]
    without: Sequence[EndRequest]
    overdue: Sequence[Work]
    lost: BaseException | None
    seconds: float


class WatchdogState:
    """Decides. All of it follows from what it was told and from the time that it is given."""

    def __init__(self, queue_limits: QueueLimits) -> None:
        self._queue_limits = queue_limits
        self._deadlines = Deadlines()
        self._asked: list[EndRequest] = []
        self._overdue: list[Work] = []

    def watch(self, requests: Sequence[RequestState], timeouts: Sequence[float | None]) -> None:
        """``timeouts``: of each whole request. The bound of its wait is the settings', once its prompt is whole."""
        for request, timeout in zip(requests, timeouts, strict=True):
            if request.sealed:
                self.watch_wait(request)
            self._deadlines.add(request, timeout, while_waiting=False)

    def watch_wait(self, request: RequestState) -> None:
        """The request's prompt is whole, so its time in the queue counts from now on."""
        self._deadlines.add(request, self._queue_limits.queue_timeout, while_waiting=True)

    def asked(self, end: EndRequest) -> None:
        """The engine's thread has been asked to end these."""
        self._asked.append(end)

    def next_deadline(self, now: float) -> float:
        """Seconds until then."""
        left = self._deadlines.seconds_left(now)
        return math.inf if left is None else left

    def due(self, now: float) -> list[EndRequest]:
        """Takes out the requests whose time is over."""
        return [out_of_time(request, waited, now) for request, waited in self._deadlines.due(now)]

    def decide(self, now: float, works: Sequence[Work], pending_death: PendingDeath | None = None) -> Decision:
        ask = self.due(now)
        self._asked += ask
        without = [end for end in self._asked if end.asked_at + PATIENCE <= now]
        self._asked = [end for end in self._asked if end.asked_at + PATIENCE > now]
        overdue = [work for work in works if is_overdue(work, self._queue_limits, now)]
        said, self._overdue = self._overdue, overdue
        fresh = [work for work in overdue if work not in said]
        return Decision(
            ask, without, fresh, self._lost(now, works, pending_death), self._seconds(now, works, pending_death)
        )

    def _lost(self, now: float, works: Sequence[Work], pending_death: PendingDeath | None) -> BaseException | None:
        if pending_death is not None and pending_death.until is not None and pending_death.until <= now:
            return pending_death.error
        for work in works:
            if now - work.since >= self._queue_limits.step_limit(work.tokens):
                return StepTimeout(f"{not_back(work, now)} (step_timeout)")
        return None

    def _seconds(self, now: float, works: Sequence[Work], pending_death: PendingDeath | None) -> float:
        """Work that begins from now on is looked at before it can be overdue."""
        queue_limits = self._queue_limits
        moments = [end.asked_at + PATIENCE for end in self._asked]
        moments += [now + _overdue_limit(1, queue_limits)]
        moments += [work.since + queue_limits.step_limit(work.tokens) for work in works]
        moments += [
            work.since + _overdue_limit(work.tokens, queue_limits)
            for work in works
            if not is_overdue(work, queue_limits, now)
        ]
        moments += [] if pending_death is None or pending_death.until is None else [pending_death.until]
        return max(_LEAST, min(FAR, self.next_deadline(now), *(moment - now for moment in moments)))


def out_of_time(request: RequestState, waited: bool, now: float) -> EndRequest:
    what = "waited too long in the queue" if waited else "took too long"
    return EndRequest((request,), FinishReason.TIMEOUT, TimedOut(f"the request {what}"), now)


def trouble(works: Sequence[Work], queue_limits: QueueLimits, now: float) -> str | None:
    """Why an engine that is at this is not ready, in words; None if it is."""
    return next((not_back(work, now) for work in works if is_overdue(work, queue_limits, now)), None)


def is_overdue(work: Work, queue_limits: QueueLimits, now: float) -> bool:
    return now - work.since >= _overdue_limit(work.tokens, queue_limits)


def _overdue_limit(tokens: int, queue_limits: QueueLimits) -> float:
    """Half of what ends the process, so that routers look away before; or when no request could be in time."""
    return min(
        queue_limits.step_limit(tokens) / 2,
        math.inf if queue_limits.request_timeout is None else queue_limits.request_timeout,
    )


def not_back(work: Work, now: float) -> str:
    return f"{work.what} has not come back for {now - work.since:.0f} s"


class Watched(Protocol):
    """An engine, as far as its watchdog has to do with it. Called by the watchdog's thread."""

    def works(self) -> Sequence[Work]: ...

    @property
    def pending_death(self) -> PendingDeath | None: ...

    def ask(self, end: EndRequest) -> None:
        """The engine's thread is to end these requests when it comes back."""

    def give_up(self, error: BaseException) -> None:
        """The engine's thread is not waited for any more."""


class Watchdog:
    """Does what a ``WatchdogState`` decides, in a thread of its own. Its methods may be called from any thread."""

    def __init__(self, engine: Watched, queue_limits: QueueLimits, name: str) -> None:
        self._engine = engine
        self._name = name
        self._state = WatchdogState(queue_limits)
        self._changed = threading.Condition()
        self._over = False
        self._news = False
        self._wakes_at = math.inf
        self._thread = threading.Thread(target=self._run, name=f"watchdog-{name}", daemon=True)
        self._thread.start()

    def watch(self, requests: Sequence[RequestState], timeouts: Sequence[float | None]) -> None:
        with self._changed:
            self._state.watch(requests, timeouts)
            if self._state.next_deadline(now := time.monotonic()) < self._wakes_at - now:
                self._tell()

    def watch_wait(self, request: RequestState) -> None:
        with self._changed:
            self._state.watch_wait(request)
            self._tell()

    def due(self) -> Sequence[EndRequest]:
        """For the engine's thread, which ends these now."""
        with self._changed:
            return self._state.due(time.monotonic())

    def asked(self, end: EndRequest) -> None:
        with self._changed:
            self._state.asked(end)
            self._tell()

    def look(self) -> None:
        """Something that the engine says of itself has changed."""
        with self._changed:
            self._tell()

    def stop(self) -> None:
        """Idempotent."""
        with self._changed:
            self._over = True
            self._tell()

    def join(self) -> None:
        self._thread.join()

    def _tell(self) -> None:
        self._news = True
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._over:
                    return
                self._news = False
                now = time.monotonic()
                decision = self._state.decide(now, self._engine.works(), self._engine.pending_death)
                self._wakes_at = now + decision.seconds
            self._do(decision)
            if decision.lost is not None:
                return
            with self._changed:
                if not self._news:
                    self._changed.wait(self._wakes_at - time.monotonic())

    def _do(self, decision: Decision) -> None:
        for work in decision.overdue:
            logger.warning("The engine of %s is not ready: %s", self._name, not_back(work, time.monotonic()))
        for end in decision.ask:
            self._engine.ask(end)
        for end in decision.without:
            end_for_readers(end.requests, end.reason, end.error)
        if decision.lost is not None:
            self._engine.give_up(decision.lost)
