"""Counts observations in the buckets of a Prometheus histogram.

Knows no metric's name. prometheus_client's own histogram takes a lock and walks over all buckets for each observation,
and writes to a file when MLServer has inference workers; only one thread may write to this one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf


class Histogram:
    """``bounds`` ascend; an observation is counted at the first bound that is not below it."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative counts, each with its upper bound as Prometheus writes it."""
        total, cumulative = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == inf else str(float(bound)), float(total)))
        return cumulative
