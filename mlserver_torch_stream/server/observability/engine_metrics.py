"""Holds the counters and gauges of this process's engines, by model and version; a reload does not reset a counter.

Knows an engine only by its ``stats()``, whose counters begin at 0 with every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from threading import Lock

from mlserver_torch_stream.engine.api import COUNTERS, EngineStats

Labels = tuple[str, str]
"""A model's name and its version, which may be empty."""

_GAUGES = tuple(each.name for each in fields(EngineStats) if each.name not in COUNTERS)


class EngineMetrics:
    """Adds up a model's engines: during a reload it has two."""

    def __init__(self) -> None:
        self._engines: dict[Labels, list[Callable[[], EngineStats]]] = {}
        self._past: dict[Labels, EngineStats] = {}  # the counts of engines that were removed
        self._lock = Lock()  # MLServer scrapes in a thread

    def add(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
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
        """The gauges of the loaded models."""
        with self._lock:
            return {labels: _added([stats() for stats in engines]) for labels, engines in self._engines.items()}

    def counters(self) -> dict[Labels, EngineStats]:
        """The counters of all models since the process began."""
        with self._lock:
            totals = dict(self._past)
            for labels, engines in self._engines.items():
                for stats in engines:
                    totals[labels] = stats().counting_on(totals.get(labels, EngineStats()))
            return totals


def _added(parts: list[EngineStats]) -> EngineStats:
    return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in _GAUGES})
