"""Finds the batches in flight that a batch has to wait for, as they still write pages or states that it reads.

Knows nothing of forwards. Batches in flight have no sequence in common, so they share only what the scheduler lets
several sequences read: pages of a common prefix, and the sources and targets of copies. A page that two of them write
does not exist: one that several sequences hold is copied first. What a batch reads, a later one may write behind it: to
positions that the earlier one does not see.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from mlserver_torch_stream.engine.batch import Batch

K = TypeVar("K", bound=Hashable)

_STATES = -1  # as if states were another group, whose pages are the slots


class BatchesAhead(Generic[K]):
    """Holds what each batch in flight writes, by the batch's key."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._written: dict[K, dict[int, set[int]]] = {}

    def add(self, key: K, batch: Batch) -> list[K]:
        """Returns the batches that this one has to wait for."""
        waits_for = [other for other, written in self._written.items() if _reads(batch, written)]
        self._written[key] = self._writes(batch)
        return waits_for

    def remove(self, key: K) -> None:
        del self._written[key]

    def _writes(self, batch: Batch) -> dict[int, set[int]]:
        """Returns the pages of each group that hold new tokens, and the targets of copies."""
        written: dict[int, set[int]] = {_STATES: set()}
        for each in batch.sequences:
            for group, table in enumerate(each.tables):
                written.setdefault(group, set()).update(table[each.start // self._page_size :])
            written[_STATES].add(each.state_slot)
        for group, _, target in batch.copies:
            written.setdefault(group, set()).add(target)
        written[_STATES].update(target for _, target in batch.state_copies)
        for numbers in written.values():
            numbers.discard(-1)
        return written


def _reads(batch: Batch, written: dict[int, set[int]]) -> bool:
    nothing: set[int] = set()
    states = written[_STATES]
    return (
        any(source in states for source, _ in batch.state_copies)
        or any(source in written.get(group, nothing) for group, source, _ in batch.copies)
        or any(each.state_slot in states for each in batch.sequences)
        or any(
            not written.get(group, nothing).isdisjoint(table)
            for each in batch.sequences
            for group, table in enumerate(each.tables)
        )
    )
