"""Exports handlers' own metrics, under our names and as TorchServe's Prometheus mode does, and finds names that clash.

Knows nothing of how they were recorded. Ours have a prefix and the labels of the model. TorchServe's have the handler's
names and dimensions, and ``Hostname``; of a histogram there are count, sum and the bucket that holds everything. A
counter whose name does not end in ``_total`` has the type ``untyped`` there: prometheus_client would change its name.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

Own = Mapping[tuple[str, str, tuple[tuple[str, str], ...]], list[float]]
"""Count and sum by name, kind and labels; the sum of a gauge is its last value."""
ModelLabels = tuple[str, str]

MODEL_LABELS = ("model", "version")
_PREFIX = "torchserve_"
_TOTAL = "_total"
_SUFFIXES = {"counter": ("", _TOTAL), "histogram": ("", "_bucket", "_count", "_sum")}
_OUR_TYPES = {"counter": "counter", "histogram": "summary"}  # others are gauges


class ExportedNames:
    """The names of exported samples, each with the metric that had it first: a name has one type in Prometheus."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, str]] = {}

    def owner_of(self, name: str, kind: str) -> tuple[str, str] | None:
        """The name and kind of the metric whose samples clash with those of this one; None if this one owns them."""
        metric, base = (name, kind), _base(name, kind)
        samples = [base + suffix for suffix in _SUFFIXES.get(kind, ("",))]
        owners = (self._owners.get(sample, metric) for sample in samples)
        clash = next((owner for owner in owners if owner != metric), None)
        if clash is None:
            self._owners.update(dict.fromkeys(samples, metric))
        return clash


def our_families(models: Mapping[ModelLabels, Own]) -> Iterator[Metric]:
    """The metrics with our prefix. A handler's dimension that is called as one of our labels has a prefix too."""
    found: dict[str, Metric] = {}
    for model_labels, own in models.items():
        for (name, kind, labels), (count, total) in list(own.items()):
            base = _PREFIX + _base(name, kind)
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
    """The name of the metric's family."""
    return name.removesuffix(_TOTAL) if kind == "counter" else name


def _apart(label: str, dimensions: Mapping[str, str]) -> str:
    shown = label
    while shown in MODEL_LABELS or (shown != label and shown in dimensions):
        shown = f"exported_{shown}"  # as Prometheus renames the labels of a target
    return shown


def families(models: Iterable[Own]) -> Iterator[Metric]:
    """TorchServe's. Adds up series with the same name and labels, as those of two versions of a model; the last gauge
    counts."""
    host = socket.gethostname()
    found: dict[str, Metric] = {}
    for (name, kind, labels), (count, total) in _added(models).items():
        family = found.setdefault(name, _family(name, kind))
        _add(family, name, kind, {"Hostname": host, **dict(labels)}, count, total)
    yield from found.values()


def _added(models: Iterable[Own]) -> Own:
    added: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = {}
    for own in models:
        for key, (count, total) in list(own.items()):
            before = added.get(key, [0.0, 0.0])
            added[key] = [before[0] + count, total if key[1] == "gauge" else before[1] + total]
    return added


def _family(name: str, kind: str) -> Metric:
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
