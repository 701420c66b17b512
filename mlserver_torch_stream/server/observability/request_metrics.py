"""Counts the requests to each model by how they ended, and their times in histograms.

Knows nothing of their export. Only the event loop's thread writes; a scrape in another thread may read counts that are
one request apart.
"""

from __future__ import annotations

import time

from mlserver_torch_stream.server.observability.engine_metrics import Labels
from mlserver_torch_stream.server.observability.histogram import Histogram
from mlserver_torch_stream.types import FinishReason

CANCELLED = "cancelled"  # the client disconnected
REFUSED = "refused"  # before it reached the engine
SEQUENCE_REASONS = tuple(reason.value for reason in FinishReason)
REQUEST_REASONS = (*SEQUENCE_REASONS, CANCELLED, REFUSED)
_SUCCESSES = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.TOOL_CALLS.value})
OTHER_ERROR = "other"
ERRORS = ("413", "415", "422", "429", "500", "503", "504", OTHER_ERROR)

# Seconds: from models of a few layers, which take half a millisecond for a token, to models that take seconds.
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_INTER_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_QUEUE = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class Duration:
    """The number of times that something happened, and the seconds that it took in all."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
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
        self.queued = Duration()  # of the requests that succeeded
        self.computed = Duration()  # of the requests that succeeded
        self.inferences = 0  # sequences of the requests that succeeded
        self.last_request = 0.0  # when the last one ended, in seconds since the epoch

    def ended(self, outcome: str, seconds: float, queued: float = 0.0, sequences: int = 1) -> None:
        """Counts a request. ``outcome``: one of ``REQUEST_REASONS``."""
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
        error = str(status)
        self.errors[error if error in self.errors else OTHER_ERROR] += 1


class RequestMetrics:
    """The counts of requests, by model and version of loaded models; a client cannot add a model."""

    def __init__(self) -> None:
        self._models: dict[Labels, ModelRequests] = {}

    def of(self, model: str, version: str | None) -> ModelRequests:
        labels = (model, version or "")
        found = self._models.get(labels)
        if found is None:
            found = self._models[labels] = ModelRequests()
        return found

    def items(self) -> list[tuple[Labels, ModelRequests]]:
        return list(self._models.items())
