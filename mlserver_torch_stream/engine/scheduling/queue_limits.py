"""What bounds the work of an engine: how much may wait, until when, and how long that will take.

Knows nothing of threads or devices; it is told the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from mlserver_torch_stream.engine.request_state import RequestState

_FEW = 64
FAR = 3600.0  # seconds; a thread cannot wait for the 300 years that somebody may set


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Times in seconds; None: no bound."""

    max_queued_requests: int = 256  # prompts that wait
    max_queued_tokens: int | None = None  # of the prompts that wait
    queue_timeout: float | None = None  # from submit to the start of the prefill
    request_timeout: float | None = None  # from submit to the last token, where the request says nothing
    step_timeout: float | None = None  # for the forward of up to ``chunk`` tokens
    chunk: int = 512

    def step_limit(self, tokens: int) -> float:
        """Seconds that the forward of so many tokens may take: a prompt that cannot be cut counts as its chunks."""
        return math.inf if self.step_timeout is None else self.step_timeout * max(1, math.ceil(tokens / self.chunk))


class Deadlines:
    """When requests must have started, or ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState, bool]] = []
        self._order = count()
        self._most = _FEW

    def add(self, request: RequestState, seconds: float | None, *, while_waiting: bool) -> None:
        """``while_waiting``: only counts for a request that has not started by then, since its prompt is whole."""
        if seconds is None:
            return
        since = request.whole_at if while_waiting else request.submitted_at
        heapq.heappush(self._heap, (since + seconds, next(self._order), request, while_waiting))
        if len(self._heap) > self._most:
            self._forget_finished()

    def _forget_finished(self) -> None:
        """Ended requests would otherwise be held, with all their text, until their deadline."""
        self._heap = [entry for entry in self._heap if not entry[2].finished]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def seconds_left(self, now: float) -> float | None:
        """Until the next deadline, as far as it is worth planning; None without one."""
        return min(FAR, max(0.0, self._heap[0][0] - now)) if self._heap else None

    def due(self, now: float) -> Iterator[tuple[RequestState, bool]]:
        """Takes out the unfinished requests whose time is over, each with whether it was still waiting."""
        while self._heap and self._heap[0][0] <= now:
            _, _, request, while_waiting = heapq.heappop(self._heap)
            if not request.finished and (not while_waiting or request.started_at is None):
                yield request, request.sealed and request.started_at is None


class ServiceRate:
    """How fast requests have been done so far."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._requests = 0

    def note(self, busy_s: float) -> None:
        self._busy_s += busy_s

    def finished(self, requests: int) -> None:
        self._requests += requests

    def seconds_for(self, requests: int) -> int:
        """Whole seconds that this many requests will take, from 1 to 120."""
        if not self._requests:
            return 1
        return min(120, max(1, math.ceil(requests * self._busy_s / self._requests)))
