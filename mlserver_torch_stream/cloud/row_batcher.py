"""Groups items into batches: by number, by weight, or when the first has waited long enough.

Knows no clock: the caller passes ``now``, of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class RowBatcher(Generic[T]):
    """``most_items``, ``most_weight``: a batch holds no more, except that one item alone may weigh more.

    ``max_wait``: seconds from a batch's first item until it leaves as it is.
    """

    def __init__(self, most_items: int, most_weight: int, max_wait: float, weigh: Callable[[T], int]) -> None:
        if most_items < 1 or most_weight < 1 or max_wait < 0:
            raise ValueError("a batch holds at least one item of weight one, and nothing waits for less than no time")
        self._most_items = most_items
        self._most_weight = most_weight
        self._max_wait = max_wait
        self._weigh = weigh
        self._items: list[T] = []
        self._weight = 0
        self._deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """When ``due`` will have something, if nothing else comes; None while nothing waits."""
        return self._deadline

    def add(self, item: T, now: float) -> list[Sequence[T]]:
        """The batches that are full now: none, one, or two where a heavy item comes behind others."""
        full = []
        weight = self._weigh(item)
        if self._items and self._weight + weight > self._most_weight:
            full.append(self.flush())
        if not self._items:
            self._deadline = now + self._max_wait
        self._items.append(item)
        self._weight += weight
        if len(self._items) >= self._most_items or self._weight >= self._most_weight:
            full.append(self.flush())
        return full

    def due(self, now: float) -> Sequence[T]:
        """What has waited long enough; empty if nothing has."""
        return self.flush() if self._deadline is not None and now >= self._deadline else []

    def flush(self) -> Sequence[T]:
        items, self._items, self._weight, self._deadline = self._items, [], 0, None
        return items
