"""Counts requests and the work of engines by model and version; a reload does not reset a counter.

Only the event loop's thread writes the counts; a scrape in another thread may see one request in some counts and not
yet in others. The counters of an engine's ``stats()`` begin at 0 with every engine. prometheus_client's histogram takes
a lock and visits all buckets for each observation, and writes a file if MLServer has inference workers; ``Histogram``
needs none of that, because it has one writer.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import inf
from threading import Lock

from mlserver_torch_stream.engine.api import COUNTERS, EngineStats
from mlserver_torch_stream.types import FinishReason

Labels = tuple[str, str]
"""A model's name and its version, which may be empty."""

_GAUGES = tuple(each.name for each in fields(EngineStats) if each.name not in COUNTERS)


class EngineMetrics:
    """The counts of each model's engines, added up, because a model has two engines during a reload."""

    def __init__(self) -> None:
        self._engines: dict[Labels, list[Callable[[], EngineStats]]] = {}
        self._past: dict[Labels, EngineStats] = {}  # the counts of engines that were removed
        self._lock = Lock()  # scrapes run in a thread

    def add(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        """Adds a running engine, whose counts ``stats`` returns."""
        with self._lock:
            engines = self._engines.setdefault((model, version or ""), [])
            if stats not in engines:  # a reload without changes keeps the engine
                engines.append(stats)

    def remove(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        """Removes an engine that has stopped, and keeps its counts."""
        labels = (model, version or "")
        with self._lock:
            engines = self._engines.get(labels, [])
            if stats not in engines:
                return
            engines.remove(stats)
            if not engines:
                del self._engines[labels]
            self._past[labels] = stats().counting_on(self._past.get(labels, EngineStats()))

    def gauges(self) -> dict[Labels, EngineStats]:
        """Returns the current values of the loaded models' engines."""
        with self._lock:
            return {labels: _added([stats() for stats in engines]) for labels, engines in self._engines.items()}

    def counters(self) -> dict[Labels, EngineStats]:
        """Returns the counters of all models since the process began."""
        with self._lock:
            totals = dict(self._past)
            for labels, engines in self._engines.items():
                for stats in engines:
                    totals[labels] = stats().counting_on(totals.get(labels, EngineStats()))
            return totals


def _added(parts: list[EngineStats]) -> EngineStats:
    return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in _GAUGES})


class Histogram:
    """Counts values in buckets with the ascending upper ``bounds``, which are inclusive."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the cumulative counts, each with its upper bound as Prometheus writes it."""
        total, cumulative = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == inf else str(float(bound)), float(total)))
        return cumulative


CANCELLED = "cancelled"  # the outcome of a request whose client disconnected
REFUSED = "refused"  # the outcome of a request that did not reach the engine
SEQUENCE_REASONS = tuple(reason.value for reason in FinishReason)
REQUEST_REASONS = (*SEQUENCE_REASONS, CANCELLED, REFUSED)
_SUCCESSES = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.TOOL_CALLS.value})
OTHER_ERROR = "other"
ERRORS = ("413", "415", "422", "429", "500", "503", "504", OTHER_ERROR)

# Bounds in seconds, for models that take from half a millisecond to seconds for a token.
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_INTER_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_QUEUE = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class Duration:
    """A count of occurrences, and their total duration in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds one occurrence of this duration."""
        self.count += 1
        self.seconds += seconds


class ModelRequests:
    """The requests to one model. Every label value starts at 0, so that a rate includes its first request."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(REQUEST_REASONS, 0)
        self.sequences = dict.fromkeys(SEQUENCE_REASONS, 0)
        self.errors = dict.fromkeys(ERRORS, 0)
        self.first_token = Histogram(_FIRST_TOKEN)
        self.inter_token = Histogram(_INTER_TOKEN)
        self.queue = Histogram(_QUEUE)
        self.request = Histogram(_REQUEST)
        self.success = Duration()
        self.fail = Duration()
        self.queued = Duration()  # the time in the queue of successful requests
        self.computed = Duration()  # the remaining time of successful requests
        self.inferences = 0  # the number of sequences of successful requests
        self.last_request = 0.0  # the end of the last request, in seconds since the epoch

    def ended(self, outcome: str, seconds: float, queued: float = 0.0, sequences: int = 1) -> None:
        """Counts a request that has ended with an ``outcome`` of ``REQUEST_REASONS`` after ``seconds``."""
        self.requests[outcome] += 1
        self.last_request = time.time()
        if outcome not in _SUCCESSES:
            self.fail.add(seconds)
            return
        self.success.add(seconds)
        self.queued.add(queued)
        self.computed.add(max(0.0, seconds - queued))
        self.inferences += sequences

    def count_error(self, status: int) -> None:
        """Counts an error by its REST status."""
        error = str(status)
        self.errors[error if error in self.errors else OTHER_ERROR] += 1


class RequestMetrics:
    """The counts of requests by model and version. Only loaded models are counted, so a client cannot add a label."""

    def __init__(self) -> None:
        self._models: dict[Labels, ModelRequests] = {}

    def of(self, model: str, version: str | None) -> ModelRequests:
        """Returns the counts of one version of a model; they are created at the first call."""
        labels = (model, version or "")
        found = self._models.get(labels)
        if found is None:
            found = self._models[labels] = ModelRequests()
        return found

    def items(self) -> list[tuple[Labels, ModelRequests]]:
        """Returns the counts of all models."""
        return list(self._models.items())


_QUIET_S = 10.0


class ClientLoad:
    """The load that clients make, to which batches give way.

    ``waiting_prompts`` is the number of complete prompts, of all models, that wait or are prefilled. ``active`` is true
    if a request is in flight, or if the last one ended less than ``quiet_s`` seconds ago, so that another one is
    likely.
    """

    def __init__(self, quiet_s: float = _QUIET_S) -> None:
        self.waiting_prompts = 0
        self.active = False
        self._quiet_s = quiet_s
        self._timer: asyncio.TimerHandle | None = None
        self._sequences: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []

    def sequences(self, model: str) -> int:
        """Returns the number of sequences that clients' requests to this model have in flight."""
        return self._sequences[model]

    def listen(self, listener: Callable[[], None]) -> None:
        """Has ``listener`` called whenever the load decreases."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Ends the calls of ``listener``."""
        self._listeners.remove(listener)

    def prompted(self, model: str, sequences: int) -> None:
        """Called when a request with this number of sequences is submitted."""
        self.waiting_prompts += 1
        self._sequences[model] += sequences
        self.active = True
        if self._timer is not None:
            self._timer.cancel()

    def first_token(self) -> None:
        """Called when a request has got its first token."""
        self.waiting_prompts -= 1
        self._tell()

    def ended(self, model: str, sequences: int, *, answered: bool) -> None:
        """Called when a request has ended. ``answered`` says whether it had its first token."""
        self.waiting_prompts -= not answered
        self._sequences[model] -= sequences
        if not any(self._sequences.values()):
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._quiet)
        self._tell()

    def _quiet(self) -> None:
        self.active = False
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()
