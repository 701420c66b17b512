"""Exports the metrics of handlers: requests, responses, workers, and the handlers' own; computed at scrape time.

Knows nothing of scrapers. ``HANDLER_METRICS`` is registered once per process in prometheus_client's default registry,
which refuses a second collector of the same names; MLServer reloads models, but never this module. Labels are a model's
name and version, and the dimensions of a handler's own metrics, whose number is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from mlserver_torch_stream.torchserve.handler_metric_names import families

_PREFIX = "torch_stream_handler_"
_HANDLERS_PREFIX = "torchserve_"
_LABELS = ("model", "version")
_MOST_SERIES = 1000  # of one model's own metrics
_MOST_LABEL_CHARS = 128
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")

ModelLabels = tuple[str, str]


_COUNTERS = {
    "responses": "Responses that handlers sent, intermediate and last ones",
    "batches": "Batches, or joins to a continuous batch, that were sent to workers",
    "batched_requests": "Requests in them",
    "worker_restarts": "Workers that were started again",
}
_GAUGES = {"waiting_requests": "Requests that wait for a worker", "workers": "Workers that are ready"}


@dataclass
class HandlerMetrics:
    """The counters of one model since the process began. ``gauges`` is read at each scrape."""

    requests: Counter[str] = field(default_factory=lambda: Counter({"ok": 0, "error": 0, "cancelled": 0, "refused": 0}))
    responses: int = 0
    batches: int = 0
    batched_requests: int = 0
    worker_restarts: int = 0
    gauges: Callable[[], Mapping[str, int]] | None = None  # None: the model is not loaded
    own: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = field(default_factory=dict)

    def record(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        """Records a value of a handler's own metric. A histogram is exported as count and sum."""
        fit = tuple(sorted((_fit(key), str(text)[:_MOST_LABEL_CHARS]) for key, text in labels.items()))
        key = (_fit(name), kind, fit)
        if key not in self.own and len(self.own) >= _MOST_SERIES:
            return
        count_and_sum = self.own.setdefault(key, [0.0, 0.0])
        count_and_sum[0] += 1
        count_and_sum[1] = value if kind == "gauge" else count_and_sum[1] + value


class HandlerMetricsCollector(Collector):
    """The metrics of all models. The event loop's thread writes; a scrape in another thread may miss a request."""

    def __init__(self) -> None:
        self.torchserve_names = False
        self._models: dict[ModelLabels, HandlerMetrics] = {}
        self._lock = Lock()

    def of(self, model: str, version: str | None) -> HandlerMetrics:
        with self._lock:
            return self._models.setdefault((model, version or ""), HandlerMetrics())

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the names of the handlers' own metrics are not known

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            models = dict(self._models)
        if models:
            yield from _of_requests(models)
            yield from _of_handlers(models)
            if self.torchserve_names:
                yield from families(metrics.own for metrics in models.values())


def _of_requests(models: Mapping[ModelLabels, HandlerMetrics]) -> Iterator[Metric]:
    requests = CounterMetricFamily(_PREFIX + "requests", "Requests by how they ended", labels=(*_LABELS, "outcome"))
    for labels, metrics in models.items():
        for outcome, count in metrics.requests.items():
            requests.add_metric((*labels, outcome), count)
    yield requests
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
        for labels, metrics in models.items():
            counter.add_metric(labels, getattr(metrics, name))
        yield counter
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
        for labels, metrics in models.items():
            gauge.add_metric(labels, 0 if metrics.gauges is None else metrics.gauges()[name])
        yield gauge


def _of_handlers(models: Mapping[ModelLabels, HandlerMetrics]) -> Iterator[Metric]:
    """Prometheus accepts one type and one set of labels for a name: series that differ from the first are left out."""
    families: dict[str, tuple[str, tuple[str, ...], Any]] = {}
    for model_labels, metrics in models.items():
        for (name, kind, labels), (count, total) in list(metrics.own.items()):
            names = tuple(key for key, _ in labels)
            if name not in families:
                families[name] = (kind, names, _family(name, kind, (*_LABELS, *names)))
            known_kind, known_names, family = families[name]
            if (kind, names) != (known_kind, known_names):
                continue
            values = (*model_labels, *(text for _, text in labels))
            family.add_metric(values, count, total) if kind == "histogram" else family.add_metric(values, total)
    yield from (family for _, _, family in families.values())


def _family(name: str, kind: str, labels: tuple[str, ...]) -> Any:
    make = {"counter": CounterMetricFamily, "histogram": SummaryMetricFamily}.get(kind, GaugeMetricFamily)
    return make(_HANDLERS_PREFIX + name, "A handler's own metric", labels=labels)


def _fit(name: str) -> str:
    return _UNFIT.sub("_", name)[:_MOST_LABEL_CHARS] or "_"


HANDLER_METRICS = HandlerMetricsCollector()
REGISTRY.register(HANDLER_METRICS)
