"""Defines the work of one step: the new tokens of each sequence, packed, and the pages that hold its keys and values.

Knows nothing of requests, sampling or tensors, so that the scheduler, the forwards and the ranks share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)  # a frozen dataclass takes three times as long to create
class BatchSequence:
    """The new tokens of one sequence: a chunk of its prompt, its newest token, or that and drafts after it.

    ``start`` tokens are in the cache already. ``tables`` holds a block table for each group of layers: the page of
    tokens ``i * page_size`` and after is entry ``i``, or -1 once a window has passed it. ``wanted`` is the number of
    its last new tokens whose logits are needed.
    """

    token_ids: Sequence[int]
    start: int
    tables: tuple[Sequence[int], ...]
    wanted: int = 1
    state_slot: int = -1  # of models that keep states; -1: none

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step. ``copies`` and ``state_copies`` are made before its forward, in their order.

    A copy is (group, source page, target page); a copy of states is (source slot, target slot).
    """

    sequences: tuple[BatchSequence, ...]
    copies: tuple[tuple[int, int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(sequence.count for sequence in self.sequences)

    @property
    def ends(self) -> list[int]:
        """The end of each sequence's tokens, counted in the packed tokens."""
        return list(accumulate(sequence.count for sequence in self.sequences))

    @property
    def wanted_rows(self) -> list[int]:
        """The packed tokens whose logits a forward returns, in order."""
        return [
            row
            for sequence, end in zip(self.sequences, self.ends, strict=True)
            for row in range(end - sequence.wanted, end)
        ]
