"""Applies a model's own generation config to each sequence: tokens that are suppressed, and tokens that are forced.

Knows nothing of requests, nor of the source of the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """The fields are transformers' ``suppress_tokens``, ``begin_suppress_tokens``, ``bad_words_ids``, ``forced_…``."""

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos: tuple[int, ...] = ()  # after a prompt of one token
    forced_eos: tuple[int, ...] = ()  # as the last token that a sequence may have


class RowRules:
    """The rules for one sequence, in the order of transformers' ``generate``."""

    def __init__(self, rules: GenerationRules, prompt: int, max_tokens: int | None, vocab_size: int) -> None:
        """``prompt`` counts the prompt's tokens. ``max_tokens`` is None if the sequence has no last token."""

        def known(ids: Sequence[int]) -> list[int]:
            return [token_id for token_id in ids if 0 <= token_id < vocab_size]

        self._always = known(rules.suppressed)
        self._forced = {}
        if rules.forced_bos and prompt == 1:
            self._forced[0] = known(rules.forced_bos)
        if rules.forced_eos and max_tokens is not None:
            self._forced[max_tokens - 1] = known(rules.forced_eos)
        # After a prompt of one token the first token is the forced one, and the suppressed position is the next.
        self._suppressed = {1 if rules.forced_bos and prompt == 1 else 0: known(rules.suppressed_first)}

    def __bool__(self) -> bool:
        """Whether any rule holds at any position."""
        return bool(self._always) or any((*self._forced.values(), *self._suppressed.values()))

    def of(self, position: int) -> tuple[list[int], list[int]]:
        """Returns the forced ids of the sequence's token ``position``, and the suppressed ones; both may be empty."""
        return self._forced.get(position, []), self._always + self._suppressed.get(position, [])
