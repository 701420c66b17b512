"""Exports the metrics of handlers, under our names and as TorchServe's Prometheus mode does.

``HANDLER_METRICS`` is registered once per process in prometheus_client's default registry, which refuses a second
collector of the same names; MLServer reloads models, but never this module. Our names have a prefix and the model's
labels. In TorchServe's mode a metric has the handler's name and dimensions, and the label ``Hostname``; a histogram has
its count, its sum and the bucket ``+Inf``. There a counter whose name does not end in ``_total`` has the type
``untyped``, because prometheus_client would rename a counter.
"""

from __future__ import annotations

import functools
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Own = Mapping[tuple[str, str, tuple[tuple[str, str], ...]], list[float]]
"""Count and sum by name, kind and labels; for a gauge the sum is its last value."""
ModelLabels = tuple[str, str]

MODEL_LABELS = ("model", "version")
_TORCHSERVE_PREFIX = "torchserve_"
_TOTAL = "_total"
_SUFFIXES = {"counter": ("", _TOTAL), "histogram": ("", "_bucket", "_count", "_sum")}
_OUR_TYPES = {"counter": "counter", "histogram": "summary"}  # all other kinds are gauges


class ExportedNames:
    """The names of exported samples, each with the metric that used it first.

    In Prometheus a name has only one type, so a second metric with the same name but another type is not exported.
    """

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, str]] = {}

    def owner_of(self, name: str, kind: str) -> tuple[str, str] | None:
        """Returns the name and kind of the metric that already uses this metric's sample names; None if no metric
        does.
        """
        metric, base = (name, kind), _base(name, kind)
        samples = [base + suffix for suffix in _SUFFIXES.get(kind, ("",))]
        owners = (self._owners.get(sample, metric) for sample in samples)
        clash = next((owner for owner in owners if owner != metric), None)
        if clash is None:
            self._owners.update(dict.fromkeys(samples, metric))
        return clash


def our_families(models: Mapping[ModelLabels, Own]) -> Iterator[Metric]:
    """Yields the handlers' metrics under our prefix. A dimension with the name of one of our labels gets a prefix."""
    found: dict[str, Metric] = {}
    for model_labels, own in models.items():
        for (name, kind, labels), (count, total) in list(own.items()):
            base = _TORCHSERVE_PREFIX + _base(name, kind)
            text = f"A handler's own {kind}"
            family = found.setdefault(name, Metric(base, text, _OUR_TYPES.get(kind, "gauge")))
            dimensions = dict(labels)
            shown = dict(zip(MODEL_LABELS, model_labels, strict=True))
            shown |= {_apart(each, dimensions): value for each, value in labels}
            if kind == "histogram":
                family.add_sample(f"{base}_count", shown, count)
                family.add_sample(f"{base}_sum", shown, total)
            else:
                family.add_sample(base + (_TOTAL if kind == "counter" else ""), shown, total)
    yield from found.values()


def _base(name: str, kind: str) -> str:
    """Returns the name of the metric's family."""
    return name.removesuffix(_TOTAL) if kind == "counter" else name


def _apart(label: str, dimensions: Mapping[str, str]) -> str:
    shown = label
    while shown in MODEL_LABELS or (shown != label and shown in dimensions):
        shown = f"exported_{shown}"  # as Prometheus renames the labels of a target
    return shown


def families(models: Iterable[Own]) -> Iterator[Metric]:
    """Yields the handlers' metrics as TorchServe's Prometheus mode exports them.

    Series with the same name and labels, such as the series of two versions of a model, are added up; for gauges the
    last value counts.
    """
    host = socket.gethostname()
    found: dict[str, Metric] = {}
    for (name, kind, labels), (count, total) in _added(models).items():
        family = found.setdefault(name, _torchserve_family(name, kind))
        _add(family, name, kind, {"Hostname": host, **dict(labels)}, count, total)
    yield from found.values()


def _added(models: Iterable[Own]) -> Own:
    added: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = {}
    for own in models:
        for key, (count, total) in list(own.items()):
            before = added.get(key, [0.0, 0.0])
            added[key] = [before[0] + count, total if key[1] == "gauge" else before[1] + total]
    return added


def _torchserve_family(name: str, kind: str) -> Metric:
    text = f"TorchServe's {kind} {name} of a handler"
    if kind == "counter":
        is_total = name.endswith(_TOTAL)
        return Metric(_base(name, kind), text, kind) if is_total else Metric(name, text, "unknown")
    return Metric(name, text, kind if kind == "histogram" else "gauge")


def _add(family: Metric, name: str, kind: str, labels: dict[str, str], count: float, total: float) -> None:
    if kind != "histogram":
        family.add_sample(name, labels, total)
        return
    family.add_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
    family.add_sample(f"{name}_count", labels, count)
    family.add_sample(f"{name}_sum", labels, total)


logger = logging.getLogger(__name__)
_PREFIX = "torch_stream_handler_"
_MAX_SERIES = 1000  # series of one model's own metrics
_MAX_WARNINGS = 20  # metrics of one model that the log names as dropped
_MAX_LABEL_CHARS = 128
_UNFIT = re.compile(r"^(?=[0-9])|[^a-zA-Z0-9_]")
_RESERVED = re.compile(r"__.*|le|quantile")  # labels that have a meaning for Prometheus

_COUNTERS = {
    "responses": "Responses that handlers sent, intermediate and last ones",
    "batches": "Batches, or joins to a continuous batch, that were sent to workers",
    "batched_requests": "Requests in the batches that were sent to workers",
    "worker_restarts": "Workers that were started again",
    "dropped_metric_values": "Values of handlers' own metrics that were not exported; the log says why",
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
    dropped_metric_values: int = 0
    gauges: Callable[[], Mapping[str, int]] | None = None  # None: the model is not loaded
    own: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = field(default_factory=dict)
    model: str = ""
    names: ExportedNames = field(default_factory=ExportedNames)  # shared by all models
    _dropped: set[str] = field(default_factory=set)  # the metrics that the log has named as dropped

    def record(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        """Records a value of a handler's own metric; if the metric cannot be exported, logs the reason once."""
        key = _series(name, kind, tuple(labels.items()))
        if key not in self.own and (why := self._refusal(*key[:2])) is not None:
            self._drop(name, why)
            return
        count_and_sum = self.own.setdefault(key, [0.0, 0.0])
        count_and_sum[0] += 1
        count_and_sum[1] = value if kind == "gauge" else count_and_sum[1] + value

    def _refusal(self, name: str, kind: str) -> str | None:
        if len(self.own) >= _MAX_SERIES:
            return f"the handler already has {_MAX_SERIES} series"
        owner = self.names.owner_of(name, kind)
        return None if owner is None else f"the {owner[1]} {owner[0]} already has this name"

    def _drop(self, name: str, why: str) -> None:
        self.dropped_metric_values += 1
        if name not in self._dropped and len(self._dropped) < _MAX_WARNINGS:
            self._dropped.add(name)
            logger.warning("Model '%s': values of the handler's metric %r are dropped: %s", self.model, name, why)


class HandlerMetricsCollector(Collector):
    """The metrics of all models. Only the event loop's thread writes them; a scrape runs in another thread, and may
    miss the newest request.
    """

    def __init__(self) -> None:
        self.torchserve_names = False
        self._models: dict[ModelLabels, HandlerMetrics] = {}
        self._names = ExportedNames()
        self._lock = Lock()

    def of(self, model: str, version: str | None) -> HandlerMetrics:
        """Returns the metrics of one version of a model; they are created at the first call."""
        with self._lock:
            return self._models.setdefault((model, version or ""), HandlerMetrics(model=model, names=self._names))

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the names of the handlers' own metrics are not known in advance

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            models = dict(self._models)
        if models:
            yield from _of_requests(models)
            yield from our_families({labels: metrics.own for labels, metrics in models.items()})
            if self.torchserve_names:
                yield from families(metrics.own for metrics in models.values())


def _of_requests(models: Mapping[ModelLabels, HandlerMetrics]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        _PREFIX + "requests", "Requests by how they ended", labels=(*MODEL_LABELS, "outcome")
    )
    for labels, metrics in models.items():
        for outcome, count in metrics.requests.items():
            requests.add_metric((*labels, outcome), count)
    yield requests
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(_PREFIX + name, text, labels=MODEL_LABELS)
        for labels, metrics in models.items():
            counter.add_metric(labels, getattr(metrics, name))
        yield counter
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=MODEL_LABELS)
        for labels, metrics in models.items():
            gauge.add_metric(labels, 0 if metrics.gauges is None else metrics.gauges()[name])
        yield gauge


@functools.lru_cache(maxsize=1024)
def _series(name: str, kind: str, labels: tuple[tuple[str, str], ...]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Returns the key of a series in ``HandlerMetrics.own``."""
    fit = {_fit_label(label): str(text)[:_MAX_LABEL_CHARS] for label, text in labels}
    return _fit(name), kind, tuple(sorted(fit.items()))


@functools.lru_cache(maxsize=1024)
def _fit(name: str) -> str:
    return _UNFIT.sub("_", name)[:_MAX_LABEL_CHARS] or "_"


@functools.lru_cache(maxsize=1024)
def _fit_label(name: str) -> str:
    fit = _fit(name)
    return f"exported_{fit}" if _RESERVED.fullmatch(fit) else fit


HANDLER_METRICS = HandlerMetricsCollector()
REGISTRY.register(HANDLER_METRICS)
