"""Holds a constraint that a model's tokenizer has been applied to; makes the matcher of each sequence from it.

Knows nothing of how the constraint was written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlserver_torch_stream.engine.constraints.token_matcher import TokenMask, TokenMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, eq=False, slots=True)
class CompiledConstraint:
    """``start`` stands before the first token and stays there. ``forced`` must come next, and ``first`` may come behind
    them. ``vocab_size`` and ``eos_ids`` are its tokenizer's."""

    start: LLMatcher
    forced: Sequence[int]
    vocab_size: int
    first: TokenMask
    eos_ids: tuple[int, ...]

    def matcher(self, end_ids: Collection[int]) -> TokenMatcher:
        """Returns the matcher of one sequence, which ``end_ids`` end where the constraint is met."""
        matcher = self.start.deep_copy()
        matcher.consume_tokens(list(self.forced))
        return TokenMatcher(matcher, self.forced, self.first, self.vocab_size, self.eos_ids, end_ids)
