"""Keeps the order of the input: results come in any order, leave in that of the rows.

Knows no tasks and no clock. Its bound counts rows that were let in and not yet delivered, so that one slow row at the
head cannot make what waits behind it grow.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class _Slot(Generic[T]):
    __slots__ = ("ready", "value")

    def __init__(self) -> None:
        self.ready = False
        self.value: T | None = None


class Window(Generic[T]):
    """At most ``limit`` undelivered items; ``peak``: the most there ever were."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("a window holds at least one item")
        self.limit = limit
        self.peak = 0
        self._first = 0
        self._slots: deque[_Slot[T]] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def room(self) -> bool:
        return len(self._slots) < self.limit

    def enter(self) -> int:
        """A ticket for the next item."""
        assert self.room, "entered a full window"
        self._slots.append(_Slot())
        self.peak = max(self.peak, len(self._slots))
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
        """The item at the head, which now is delivered."""
        assert self.ready, "the head is not settled"
        self._first += 1
        value = self._slots.popleft().value
        return value  # type: ignore[return-value]
