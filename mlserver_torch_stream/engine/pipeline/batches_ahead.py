"""Finds the batches in flight that a batch has to wait for, as it reads or writes their pages or states.

Knows nothing of forwards. Batches in flight have no sequence in common, so they share only what the scheduler lets
several sequences read: pages of a common prefix, and the sources and targets of copies. No two batches write the same
page, as a page that several sequences hold is copied first. No other sequence writes a page that a sequence in flight
reads, except the source of a copy, which its sequence has given back.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlserver_torch_stream.engine.batch import Batch

K = TypeVar("K", bound=Hashable)
Pages = Mapping[int, set[int]]  # of each group

_STATES = -1  # as if states were another group, whose pages are the slots
_NONE: set[int] = set()


@dataclass(frozen=True, slots=True)
class _Use:
    """``written``: the pages of new tokens and the targets of copies; ``copied``: the sources of copies."""

    written: Pages
    copied: Pages


class BatchesAhead(Generic[K]):
    """Holds what each batch in flight writes and copies, by the batch's key."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._uses: dict[K, _Use] = {}

    def add(self, key: K, batch: Batch) -> list[K]:
        """Returns the batches that this one has to wait for."""
        use = _Use(self._written(batch), _copied(batch))
        waits_for = [
            other
            for other, ahead in self._uses.items()
            if _reads(batch, ahead.written) or _meet(use.copied, ahead.written) or _meet(use.written, ahead.copied)
        ]
        self._uses[key] = use
        return waits_for

    def remove(self, key: K) -> None:
        del self._uses[key]

    def _written(self, batch: Batch) -> Pages:
        written: dict[int, set[int]] = {}
        for each in batch.sequences:
            for group, table in enumerate(each.tables):
                written.setdefault(group, set()).update(table[each.start // self._page_size :])
            written.setdefault(_STATES, set()).add(each.state_slot)
        for group, _, target in batch.copies:
            written.setdefault(group, set()).add(target)
        for _, target in batch.state_copies:
            written.setdefault(_STATES, set()).add(target)
        for numbers in written.values():
            numbers.discard(-1)
        return written


def _copied(batch: Batch) -> Pages:
    copied: dict[int, set[int]] = {}
    for group, source, _ in (*batch.copies, *((_STATES, *copy) for copy in batch.state_copies)):
        copied.setdefault(group, set()).add(source)
    return copied


def _meet(one: Pages, other: Pages) -> bool:
    return any(not pages.isdisjoint(other.get(group, _NONE)) for group, pages in one.items())


def _reads(batch: Batch, written: Pages) -> bool:
    states = written.get(_STATES, _NONE)
    return any(
        each.state_slot in states
        or any(not written.get(group, _NONE).isdisjoint(table) for group, table in enumerate(each.tables))
        for each in batch.sequences
    )
