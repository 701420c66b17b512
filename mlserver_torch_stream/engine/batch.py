"""Defines the work of one step: the new tokens of each sequence, packed, and the pages of its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)  # a frozen dataclass takes three times as long to create
class BatchSequence:
    """The new tokens of one sequence: a chunk of its prompt, or its newest token and the drafts after it, if any.

    ``start`` tokens are in the cache already. ``tables`` holds a block table for each group of layers: entry ``i`` is
    the page that holds the tokens from ``i * page_size`` on, or -1 once a sliding window has moved past that page. The
    forward returns logits for the last ``wanted`` of the new tokens.
    """

    token_ids: Sequence[int]
    start: int
    tables: tuple[Sequence[int], ...]
    wanted: int = 1
    state_slot: int = -1  # where the sequence's recurrent state is, such as Mamba's; -1: the model has none

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
