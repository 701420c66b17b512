"""Bounds the work of an engine: how many requests may wait, until when, and how long they are likely to wait.

Knows nothing of threads or devices; its callers give it the time.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from mlserver_torch_stream.engine.request_state import RequestState

_FEW = 64
FAR = 3600.0  # seconds; a thread cannot wait for a timeout of 300 years


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Times are in seconds. None means no limit."""

    max_queued_requests: int = 256  # waiting requests
    max_queued_tokens: int | None = None  # of the prompts of waiting requests
    queue_timeout: float | None = None  # from submit to the start of the prefill
    request_timeout: float | None = None  # from submit to the last token, for requests without a timeout of their own
    step_timeout: float | None = None  # for the forward of up to ``chunk`` tokens
    chunk: int = 512

    def step_limit(self, tokens: int) -> float:
        """Returns the seconds that a forward of so many tokens may take: the timeout for each ``chunk`` in it."""
        return math.inf if self.step_timeout is None else self.step_timeout * max(1, math.ceil(tokens / self.chunk))


class Deadlines:
    """Holds the times at which requests must have started, or ended. It does not keep requests alive."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[RequestState], bool]] = []
        self._order = count()
        self._most = _FEW

    def add(self, request: RequestState, seconds: float | None, *, while_waiting: bool) -> None:
        """Adds a deadline, ``seconds`` after the submit. A ``while_waiting`` one counts from when the prompt is whole.

        A ``while_waiting`` deadline holds only for a request that has not started by then.
        """
        if seconds is None:
            return
        since = request.whole_at if while_waiting else request.submitted_at
        heapq.heappush(self._heap, (since + seconds, next(self._order), weakref.ref(request), while_waiting))
        if len(self._heap) > self._most:
            self._forget_freed()

    def _forget_freed(self) -> None:
        """Drops the deadlines of requests that have ended and were freed."""
        self._heap = [entry for entry in self._heap if entry[2]() is not None]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def seconds_left(self, now: float) -> float:
        """Returns the seconds until the next deadline, at most ``FAR``."""
        return min(FAR, max(0.0, self._heap[0][0] - now)) if self._heap else FAR

    def due(self, now: float) -> Iterator[tuple[RequestState, bool]]:
        """Removes passed deadlines; yields the unfinished requests, each with whether it still waits."""
        while self._heap and self._heap[0][0] <= now:
            _, _, made_for, while_waiting = heapq.heappop(self._heap)
            request = made_for()
            if request is not None and not request.finished and (not while_waiting or request.started_at is None):
                yield request, request.started_at is None and (while_waiting or request.sealed)


class ServiceRate:
    """Estimates how long requests take, from those that have ended."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._requests = 0

    def note(self, busy_s: float) -> None:
        self._busy_s += busy_s

    def finished(self, requests: int) -> None:
        self._requests += requests

    def seconds_for(self, requests: int) -> int:
        """Returns the whole seconds that this many requests are likely to take, from 1 to 120."""
        if not self._requests:
            return 1
        return min(120, max(1, math.ceil(requests * self._busy_s / self._requests)))
