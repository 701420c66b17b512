"""The engines' counters and gauges, read at scrape time, in prometheus_client's default registry.

Knows an engine only by its ``stats()``. Registered once per process: MLServer never reloads this module, and the
registry refuses a second collector with the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlserver_torch_stream.engine.api import EngineStats

_PREFIX = "torch_stream_"
_LABELS = ("model", "version")
_GAUGES = {
    "running_rows": "Rows that are being decoded now",
    "waiting_jobs": "Prompts that are queued",
    "prefilling_jobs": "Prompts in prefill",
    "kv_cache_bytes": "KV cache reserved by running and prefilling rows",
    "kv_cache_budget": "KV cache that may be reserved at most",
}
_COUNTERS = {
    "decode_steps": "Decode steps of the whole batch",
    "prefill_tokens": "Prompt tokens prefilled",
    "generated_tokens": "Tokens generated",
    "cancelled_sequences": "Sequences that ended because their client left",
    "zombie_steps": "Rows decoded in a step that began after their stream was closed",
}


class EngineCollector(Collector):
    """All loaded engines of this process, by model and version."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], Callable[[], EngineStats]] = {}
        self._lock = Lock()  # MLServer scrapes in a thread

    def add(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        with self._lock:
            self._engines[model, version or ""] = stats

    def remove(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        """Forgets this engine, unless a reload has put a newer one in its place."""
        with self._lock:
            if self._engines.get((model, version or "")) == stats:
                del self._engines[model, version or ""]

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            snapshot = {labels: stats() for labels, stats in self._engines.items()}
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            yield _filled(gauge, name, snapshot)
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            yield _filled(counter, name, snapshot)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, name: str, snapshot: dict[tuple[str, str], EngineStats]
) -> Metric:
    for labels, stats in snapshot.items():
        family.add_metric(labels, getattr(stats, name))
    return family


ENGINES = EngineCollector()
REGISTRY.register(ENGINES)
