"""Holds a constraint that a model's tokenizer has been applied to; makes the matcher of each sequence from it.

Knows nothing of how the constraint was written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, eq=False, slots=True)
class CompiledConstraint:
    """``start`` stands before the first token and stays there, and ``forced`` must come next. ``vocab_size`` and
    ``eos_ids`` are its tokenizer's."""

    start: LLMatcher
    forced: Sequence[int]
    vocab_size: int
    eos_ids: tuple[int, ...]
    workers: Executor

    def matcher(self, end_ids: Collection[int]) -> TokenMatcher:
        """Returns the matcher of one sequence, which ``end_ids`` end where the constraint is met."""
        return TokenMatcher(self.start.deep_copy(), self.forced, self.vocab_size, self.eos_ids, end_ids, self.workers)
