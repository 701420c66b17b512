"""Exports handlers' own metrics as TorchServe's Prometheus mode does: with their names, dimensions and ``Hostname``.

Knows nothing of how they were recorded. Of a histogram there are count, sum and the bucket that holds everything. A
counter whose name does not end in ``_total`` has the type ``untyped``: prometheus_client would change its name.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

Own = Mapping[tuple[str, str, tuple[tuple[str, str], ...]], list[float]]
"""Count and sum by name, kind and labels; the sum of a gauge is its last value."""

_TOTAL = "_total"


def families(models: Iterable[Own]) -> Iterator[Metric]:
    """Adds up series with the same name and labels, as those of two versions of a model; the last gauge counts."""
    host = socket.gethostname()
    found: dict[str, tuple[str, tuple[str, ...], Metric]] = {}
    for (name, kind, labels), (count, total) in _added(models).items():
        names = tuple(key for key, _ in labels)
        known_kind, known_names, family = found.setdefault(name, (kind, names, _family(name, kind)))
        if (kind, names) == (known_kind, known_names):  # Prometheus takes one type and one set of labels for a name
            _add(family, name, kind, {"Hostname": host, **dict(labels)}, count, total)
    yield from (family for _, _, family in found.values())


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
        return Metric(name.removesuffix(_TOTAL), text, kind) if is_total else Metric(name, text, "unknown")
    return Metric(name, text, kind if kind == "histogram" else "gauge")


def _add(family: Metric, name: str, kind: str, labels: dict[str, str], count: float, total: float) -> None:
    if kind != "histogram":
        family.add_sample(name, labels, total)
        return
    family.add_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
    family.add_sample(f"{name}_count", labels, count)
    family.add_sample(f"{name}_sum", labels, total)
