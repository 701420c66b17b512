"""The counts of requests to each model, of how they ended and of how long they took.

Knows nothing of their export. Only the event loop's thread writes; a scrape in another thread may read counts that are
one request apart.
"""

from __future__ import annotations

from mlserver_torch_stream.server.observability.engine_metrics import Labels
from mlserver_torch_stream.server.observability.histogram import Histogram
from mlserver_torch_stream.types import FinishReason

CANCELLED = "cancelled"  # the client disconnected
REFUSED = "refused"  # before it reached the engine
SEQUENCE_REASONS = tuple(reason.value for reason in FinishReason)
REQUEST_REASONS = (*SEQUENCE_REASONS, CANCELLED, REFUSED)
OTHER_ERROR = "other"
ERRORS = ("413", "415", "422", "429", "500", "503", "504", OTHER_ERROR)

# Seconds: from models of a few layers, which take half a millisecond for a token, to models that take seconds.
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_INTER_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_QUEUE = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


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

    def count_error(self, status: int) -> None:
        error = str(status)
        self.errors[error if error in self.errors else OTHER_ERROR] += 1


class RequestMetrics:
    """By model and version of loaded models; a client cannot add one."""

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
