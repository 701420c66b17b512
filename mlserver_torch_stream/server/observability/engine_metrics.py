"""What the engines of this process have counted, by model and version: since its start, whatever was reloaded since.

Knows an engine only by its ``stats()``, whose counters begin at 0 with every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from mlserver_torch_stream.engine.api import EngineStats

Labels = tuple[str, str]
"""A model's name and its version, which may be empty."""

GAUGES = (
    "running_sequences",
    "waiting_requests",
    "waiting_tokens",
    "prefilling_requests",
    "open_prompts",
    "kv_cache_bytes",
    "kv_cache_budget",
    "prefix_cache_bytes",
)


class EngineMetrics:
    """During a reload a model has two engines, and both count."""

    def __init__(self) -> None:
        self._engines: dict[Labels, list[Callable[[], EngineStats]]] = {}
        self._past: dict[Labels, EngineStats] = {}  # what engines counted that are gone
        self._lock = Lock()  # MLServer scrapes in a thread

    def add(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        with self._lock:
            engines = self._engines.setdefault((model, version or ""), [])
            if stats not in engines:  # a reload that changes nothing keeps its engine
                engines.append(stats)

    def remove(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        """Keeps what this engine has counted. Called when it counts no more."""
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
        """Of the models that are loaded."""
        with self._lock:
            return {labels: _added([stats() for stats in engines]) for labels, engines in self._engines.items()}

    def counters(self) -> dict[Labels, EngineStats]:
        """Of all models that ever were."""
        with self._lock:
            totals = dict(self._past)
            for labels, engines in self._engines.items():
                for stats in engines:
                    totals[labels] = stats().counting_on(totals.get(labels, EngineStats()))
            return totals


def _added(parts: list[EngineStats]) -> EngineStats:
    return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in GAUGES})
