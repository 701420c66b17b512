"""Restores the order of the input: results are set in any order and leave in the order of the rows.

Knows no asyncio tasks and no clock. Its bounds count the rows that have entered and are not delivered, so that the rows
that wait for a slow row are bounded, in number and in weight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    weight: int
    ready: bool = False
    value: T | None = None


class Window(Generic[T]):
    """Holds at most ``limit`` undelivered items of ``most_weight`` together; a heavier item enters an empty window.

    ``peak`` and ``peak_weight``: the largest number and weight so far.
    """

    def __init__(self, limit: int, most_weight: int) -> None:
        if limit < 1 or most_weight < 1:
            raise ValueError("a window holds at least one item of weight one")
        self.limit = limit
        self.most_weight = most_weight
        self.peak = 0
        self.peak_weight = 0
        self._weight = 0
        self._first = 0
        self._slots: deque[_Slot[T]] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def room(self, weight: int) -> bool:
        if not self._slots:
            return True
        return len(self._slots) < self.limit and self._weight + weight <= self.most_weight

    def enter(self, weight: int) -> int:
        """Lets the next item in and returns its ticket."""
        assert self.room(weight), "entered a full window"
        self._slots.append(_Slot(weight))
        self._weight += weight
        self.peak = max(self.peak, len(self._slots))
        self.peak_weight = max(self.peak_weight, self._weight)
        return self._first + len(self._slots) - 1

    def settle(self, ticket: int, value: T) -> None:
        slot = self._slots[ticket - self._first]
        assert not slot.ready, "settled twice"
        slot.ready, slot.value = True, value

    @property
    def ready(self) -> bool:
        """True if the item at the head can leave."""
        return bool(self._slots) and self._slots[0].ready

    def leave(self) -> T:
        """Removes the item at the head and returns its value."""
        assert self.ready, "the head is not settled"
        self._first += 1
        slot = self._slots.popleft()
        self._weight -= slot.weight
        return slot.value  # type: ignore[return-value]
