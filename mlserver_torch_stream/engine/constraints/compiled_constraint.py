"""Holds a constraint that was compiled for a model's tokenizer; makes the matcher of each sequence from it.

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
    """``start`` is the library's matcher before the first token; only copies of it consume tokens.

    Each answer begins with the tokens ``forced``, and ``first_mask`` says which tokens may follow those. ``vocab_size``
    and ``eos_ids`` are the tokenizer's. ``field`` is the request's parameter that gave the constraint.
    """

    start: LLMatcher
    forced: Sequence[int]
    vocab_size: int
    first_mask: TokenMask
    eos_ids: tuple[int, ...]
    field: str

    def matcher(self, end_ids: Collection[int]) -> TokenMatcher:
        """Returns the matcher of a sequence; a token of ``end_ids`` may end it where the constraint is met."""
        matcher = self.start.deep_copy()
        matcher.consume_tokens(list(self.forced))
        return TokenMatcher(matcher, self.forced, self.first_mask, self.vocab_size, self.eos_ids, end_ids, self.field)
