"""Groups items into batches, bounded by number, by weight and by the time that the first item waits.

Knows no clock: the caller passes ``now``, the time of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class RowBatcher(Generic[T]):
    """A batch holds at most ``most_items`` items of at most ``most_weight`` together; a single item may weigh more.

    ``max_wait``: the seconds after its first item at which a batch leaves, full or not.
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
        self.deadline: float | None = None  # from then on ``due`` returns the open batch; None while no item waits

    def add(self, item: T, now: float) -> list[Sequence[T]]:
        """The batches that are full now: none, one, or two if a heavy item follows lighter ones."""
        full = []
        weight = self._weigh(item)
        if self._items and self._weight + weight > self._most_weight:
            full.append(self.flush())
        if not self._items:
            self.deadline = now + self._max_wait
        self._items.append(item)
        self._weight += weight
        if len(self._items) >= self._most_items or self._weight >= self._most_weight:
            full.append(self.flush())
        return full

    def due(self, now: float) -> Sequence[T]:
        """The open batch if its first item has waited ``max_wait``, else an empty one."""
        return self.flush() if self.deadline is not None and now >= self.deadline else []

    def flush(self) -> Sequence[T]:
        items, self._items, self._weight, self.deadline = self._items, [], 0, None
        return items
