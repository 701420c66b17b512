"""Records the work of engines' threads, lets engines on one device take turns, and enforces deadlines of requests.

While a step does not return, the watchdog asks the engine's thread to end requests, then ends them itself, and in the
end abandons the thread.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from mlserver_torch_stream.engine.failures import StepTimeout
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.scheduler.queue import QueueLimits
from mlserver_torch_stream.errors import TimedOut
from mlserver_torch_stream.types import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work, and the number of tokens in its forward.

    ``str(what)`` describes the work; it is formatted only for a report.
    """

    what: object
    tokens: int
    since: float


class StepProgress:
    """Records the current work of the engine's thread, and forwards in other threads; each forward has a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: Work | None = None
        self._in_flight: dict[Hashable, Work] = {}

    def at(self, what: object, tokens: int = 1) -> None:
        """Records that the engine's thread has started this work, and that its previous work has ended."""
        self._current = Work(what, tokens, self._clock())

    def rest(self) -> None:
        """Records that the engine's thread is idle or waits for forwards in other threads."""
        self._current = None

    def launched(self, key: Hashable, what: object, tokens: int = 1) -> None:
        """Records work of another thread or a device under this key."""
        self._in_flight[key] = Work(what, tokens, self._clock())

    def completed(self, key: Hashable) -> None:
        """Removes the work of this key."""
        self._in_flight.pop(key, None)

    def works(self) -> list[Work]:
        """Returns all work that is not complete. Any thread may call it."""
        current = self._current
        return [*list(self._in_flight.values()), *([current] if current is not None else [])]


class FairLock:
    """A lock that threads get in the order of their requests, so that engines on the same cores take turns.

    Two OpenMP pools that spin on the same cores slow each other down tenfold (measured). With a plain lock, a busy
    engine would take the lock again before a waiting engine could wake up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False
        self.progress: StepProgress | None = None  # the progress of the engine that holds the lock

    @contextmanager
    def held_by(self, progress: StepProgress) -> Iterator[int]:
        """Holds the lock during the ``with`` block, and yields for how many other threads this thread had to wait.

        ``progress`` shows the engines that wait for the lock how long the holder's step has taken.
        """
        with self as waited:
            self.progress = progress
            try:
                yield waited
            finally:
                self.progress = None

    def __enter__(self) -> int:
        """Takes the lock, and returns for how many other threads this thread had to wait."""
        with self._lock:
            if not self._held:
                self._held = True
                return 0
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
            before = len(self._waiting)  # the holder, and those that asked earlier
        gate.acquire()
        return before

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def yield_turn(self) -> None:
        """Releases the lock, which the caller must hold, and takes it again after all waiting threads have had it."""
        progress, self.progress = self.progress, None
        self.__exit__()
        self.__enter__()
        self.progress = progress


_FEW = 64
FAR = 3600.0  # seconds; a thread cannot wait for a timeout of 300 years


class Deadlines:
    """Holds the times by which requests must have started or ended. The requests are not kept alive by it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[RequestState], bool]] = []
        self._order = count()
        self._most = _FEW

    def add(self, request: RequestState, seconds: float | None, *, while_waiting: bool) -> None:
        """Adds a deadline: ``seconds`` after the submit or, with ``while_waiting``, after the prompt became whole.

        A ``while_waiting`` deadline applies only to a request that has not started by then.
        """
        if seconds is None:
            return
        since = request.whole_at if while_waiting else request.submitted_at
        heapq.heappush(self._heap, (since + seconds, next(self._order), weakref.ref(request), while_waiting))
        if len(self._heap) > self._most:
            self._forget_freed()

    def _forget_freed(self) -> None:
        """Drops the deadlines of requests that have been freed."""
        self._heap = [entry for entry in self._heap if entry[2]() is not None]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def seconds_left(self, now: float) -> float:
        """Returns the seconds until the next deadline, at most ``FAR``."""
        return min(FAR, max(0.0, self._heap[0][0] - now)) if self._heap else FAR

    def due(self, now: float) -> Iterator[tuple[RequestState, bool]]:
        """Removes passed deadlines.

        Yields their unfinished requests, and for each whether it still waits in the queue.
        """
        while self._heap and self._heap[0][0] <= now:
            _, _, made_for, while_waiting = heapq.heappop(self._heap)
            request = made_for()
            if request is not None and not request.finished and (not while_waiting or request.started_at is None):
                yield request, request.started_at is None and (while_waiting or not request.input.open)


# Seconds for the engine's thread to end a request itself, with the text that it holds back. Most steps are shorter.
PATIENCE = 0.5
_LEAST = 0.01  # seconds: the shortest time between two decisions


@dataclass(frozen=True, slots=True)
class EndRequest:
    """An order to the engine's thread to end these requests. ``asked_at`` is the time of the order."""

    requests: tuple[RequestState, ...]
    reason: FinishReason
    error: Exception
    asked_at: float


@dataclass(frozen=True, slots=True)
class PendingDeath:
    """An error that should end the engine's thread, and the time at which the watchdog abandons the thread."""

    error: BaseException
    until: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The watchdog's next actions. The watchdog asks the engine's thread to end the requests of ``ask``.

    The thread has not ended the requests of ``unanswered`` in time, so the watchdog ends them itself. The watchdog logs
    each piece of ``overdue`` work once. If ``lost`` is an error, the watchdog abandons the thread because of that
    error. The next decision is due in ``seconds`` seconds.
    """

    ask: Sequence[EndRequest]
    unanswered: Sequence[EndRequest]
    overdue: Sequence[Work]
    lost: BaseException | None
    seconds: float


class WatchdogState:
    """Decides what the watchdog does.

    This class does not read a clock: its methods are called with the time ``now``.
    """

    def __init__(self, queue_limits: QueueLimits) -> None:
        self._queue_limits = queue_limits
        self._deadlines = Deadlines()
        self._expected: list[EndRequest] = []
        self._logged: list[tuple[float, int]] = []  # overdue work; a ``Work`` would keep its sequences alive

    def watch(self, requests: Sequence[RequestState]) -> None:
        """Adds the timeouts of requests and, for requests whose prompt is whole, the limit of the queue time."""
        for request in requests:
            if not request.input.open:
                self.watch_wait(request)
            self._deadlines.add(request, request.timeout_s, while_waiting=False)

    def watch_wait(self, request: RequestState) -> None:
        """Adds the limit of the queue time for a request whose prompt has become whole."""
        self._deadlines.add(request, self._queue_limits.queue_timeout, while_waiting=True)

    def expect(self, end: EndRequest) -> None:
        """Records that the engine's thread was asked to end requests, so that it is expected to do so in time."""
        self._expected.append(end)

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until the next deadline, at most an hour."""
        return self._deadlines.seconds_left(now)

    def due(self, now: float) -> list[EndRequest]:
        """Removes and returns the requests whose deadline has passed."""
        return [out_of_time(request, waited, now) for request, waited in self._deadlines.due(now)]

    def decide(self, now: float, works: Sequence[Work], pending_death: PendingDeath | None = None) -> Decision:
        """Returns what the watchdog does at the time ``now``; ``works`` is the work that has not completed."""
        ask = self.due(now)
        self._expected += ask
        unanswered = [end for end in self._expected if end.asked_at + PATIENCE <= now]
        self._expected = [end for end in self._expected if end.asked_at + PATIENCE > now]
        overdue = [work for work in works if is_overdue(work, self._queue_limits, now)]
        fresh = [work for work in overdue if (work.since, work.tokens) not in self._logged]
        self._logged = [(work.since, work.tokens) for work in overdue]
        return Decision(
            ask, unanswered, fresh, self._lost(now, works, pending_death), self._seconds(now, works, pending_death)
        )

    def _lost(self, now: float, works: Sequence[Work], pending_death: PendingDeath | None) -> BaseException | None:
        if pending_death is not None and pending_death.until <= now:
            return pending_death.error
        for work in works:
            if now - work.since >= self._queue_limits.step_limit(work.tokens):
                return StepTimeout(f"{not_back(work, now)} (step_timeout)")
        return None

    def _seconds(self, now: float, works: Sequence[Work], pending_death: PendingDeath | None) -> float:
        """Returns the seconds until the next decision, which is made before work that starts now can be overdue."""
        queue_limits = self._queue_limits
        moments = [end.asked_at + PATIENCE for end in self._expected]
        moments += [now + _overdue_limit(1, queue_limits)]
        moments += [work.since + queue_limits.step_limit(work.tokens) for work in works]
        moments += [
            work.since + _overdue_limit(work.tokens, queue_limits)
            for work in works
            if not is_overdue(work, queue_limits, now)
        ]
        moments += [] if pending_death is None else [pending_death.until]
        return max(_LEAST, min(self.next_deadline(now), *(moment - now for moment in moments)))


def out_of_time(request: RequestState, waited: bool, now: float) -> EndRequest:
    """Returns the order to end a request that is out of time. ``waited`` means that its time ran out in the queue."""
    what = "exceeded its timeout in the queue" if waited else "exceeded its timeout"
    return EndRequest((request,), FinishReason.TIMEOUT, TimedOut(f"the request {what}"), now)


def trouble(works: Sequence[Work], queue_limits: QueueLimits, now: float) -> str | None:
    """Describes a step that has run for so long that the engine is not ready; None if there is no such step."""
    return next((not_back(work, now) for work in works if is_overdue(work, queue_limits, now)), None)


def is_overdue(work: Work, queue_limits: QueueLimits, now: float) -> bool:
    """Returns whether a step has run for so long that the engine should report that it is not ready."""
    return now - work.since >= _overdue_limit(work.tokens, queue_limits)


def _overdue_limit(tokens: int, queue_limits: QueueLimits) -> float:
    """Returns half of the step limit, or the request timeout if that is shorter.

    After this time the engine reports that it is not ready, so that routers avoid the server.
    """
    return min(
        queue_limits.step_limit(tokens) / 2,
        math.inf if queue_limits.request_timeout is None else queue_limits.request_timeout,
    )


def not_back(work: Work, now: float) -> str:
    """Returns a sentence for logs and errors that says what has not returned, and for how many seconds."""
    return f"{work.what} has not returned for {now - work.since:.0f} s"


class Watched(Protocol):
    """The part of an engine that its watchdog calls, on the watchdog's thread."""

    def works(self) -> Sequence[Work]:
        """Returns the work of the engine's threads that is not complete."""

    @property
    def pending_death(self) -> PendingDeath | None:
        """The error that ends the engine's thread before its next step; None if there is none."""

    def ask(self, end: EndRequest) -> None:
        """Asks the engine's thread to end these requests when its step returns."""

    def give_up(self, error: BaseException) -> bool:
        """Abandons the engine's thread, so that nothing waits for it any longer.

        If the thread's work can be ended instead, ends it and returns False; the thread then continues.
        """


class Watchdog:
    """Carries out the decisions of a ``WatchdogState`` in a separate thread. Any thread may call its methods."""

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

    def watch(self, requests: Sequence[RequestState]) -> None:
        with self._changed:
            self._state.watch(requests)
            if self._state.next_deadline(now := time.monotonic()) < self._wakes_at - now:
                self._wake()

    def watch_wait(self, request: RequestState) -> None:
        with self._changed:
            self._state.watch_wait(request)
            self._wake()

    def due(self) -> Sequence[EndRequest]:
        """Removes and returns the requests whose deadline has passed, for the engine's thread to end them."""
        with self._changed:
            return self._state.due(time.monotonic())

    def expect(self, end: EndRequest) -> None:
        with self._changed:
            self._state.expect(end)
            self._wake()

    def look(self) -> None:
        """Wakes the watchdog, because the engine's state has changed."""
        with self._changed:
            self._wake()

    def stop(self) -> None:
        """Ends the watchdog's thread. May be called again."""
        with self._changed:
            self._over = True
            self._wake()

    def join(self) -> None:
        self._thread.join()

    def _wake(self) -> None:
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
            if self._do(decision):
                return
            del decision  # it holds requests, which may end before the next decision
            with self._changed:
                if not self._news:
                    self._changed.wait(self._wakes_at - time.monotonic())

    def _do(self, decision: Decision) -> bool:
        """Carries out a decision. Returns whether the engine's thread was abandoned."""
        for work in decision.overdue:
            logger.warning("The engine of %s is not ready: %s", self._name, not_back(work, time.monotonic()))
        for end in decision.ask:
            self._engine.ask(end)
        for end in decision.unanswered:
            for request in end.requests:
                request.end_for_reader(end.reason, end.error)
        return decision.lost is not None and self._engine.give_up(decision.lost)
