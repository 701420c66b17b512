"""Says how the logits of one row change before sampling: bias, penalties, bad words, minimum length, constraint.

Knows nothing of the batch, the temperature or the random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher
from mlserver_torch_stream.engine.sampling.adjust_rows import NO_FLOATS, NO_IDS, RowEdits
from mlserver_torch_stream.engine.sampling.generation_rules import GenerationRules, RowRules
from mlserver_torch_stream.types import SamplingParameters


class LogitAdjuster:
    """The adjustments of one sequence, in transformers' order.

    They are the bias, the repetition penalty (prompt and generated tokens), presence and frequency penalties (generated
    tokens), bad words, no ``end_ids`` before ``min_tokens``, and the model's own ``rules``, which need ``max_tokens``.
    Ids at or above ``vocab_size`` are ignored. A ``matcher`` excludes the tokens that its constraint does not allow,
    and takes precedence over tokens that the model's rules force.
    """

    def __init__(
        self,
        params: SamplingParameters,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Iterable[int],
        bad_words_ids: Sequence[Sequence[int]] = (),
        rules: GenerationRules | None = None,
        max_tokens: int | None = None,
        matcher: TokenMatcher | None = None,
    ) -> None:
        rules = rules or GenerationRules()
        bad_words_ids = (*bad_words_ids, *rules.bad_words_ids)
        end_ids = {token_id for token_id in end_ids if 0 <= token_id < vocab_size}
        self._min_tokens = params.min_tokens if end_ids else 0
        self._end_ids = sorted(end_ids)
        self._bias = _bias(params.logit_bias, vocab_size) if params.logit_bias else None
        self._bad_words = _BadWords(bad_words_ids, prompt_ids, vocab_size, end_ids) if bad_words_ids else None
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        penalised = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        counted = prompt_ids if self._repetition != 1.0 else ()
        self._seen = _SeenTokens(counted, vocab_size) if penalised else None
        self._rules = RowRules(rules, len(prompt_ids), max_tokens, vocab_size)
        self._accepted = 0
        self.matcher = matcher
        changes = (self._bias, self._seen, self._bad_words, self._min_tokens, self._rules, matcher)
        self.never_edits = not any(changes)

    def accept(self, token_id: int) -> None:
        """Counts a generated token."""
        self._accepted += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self._bad_words is not None:
            self._bad_words.add(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    @property
    def only_token(self) -> int | None:
        """The token that the constraint forces; None where there is a choice, or where that token is banned."""
        if self.matcher is None or not self.matcher.forced:
            return None
        forced, _ = self._forced_and_banned()
        return forced[0] if forced else None

    def _forced_and_banned(self) -> tuple[Sequence[int], Sequence[int]]:
        forced, banned = self._rules.of(self._accepted)
        if self.matcher is None and forced:  # the model's rules leave no other token
            return forced, banned
        banned = [*banned, *(self._bad_words.banned() if self._bad_words is not None else ())]
        banned += self._end_ids if self._accepted < self._min_tokens else []
        next_forced = () if self.matcher is None else islice(self.matcher.forced, 1)
        return [token_id for token_id in next_forced if token_id not in banned], banned

    def edits(self) -> RowEdits | None:
        """Returns the changes that the sequence's next logits get before sampling; None: they stay as they are."""
        if self.never_edits:
            return None
        forced, banned = self._forced_and_banned()
        if not (forced or banned or self._bias or self._seen or self.matcher):
            return None
        bias_ids, added = (NO_IDS, NO_FLOATS) if self._bias is None else self._bias
        seen_ids, subtracted = NO_IDS, NO_FLOATS
        if self._seen is not None:
            seen_ids, counts = self._seen.arrays()
            subtracted = np.float32(self._frequency) * counts + np.float32(self._presence) * (counts > 0)
        allowed = None if self.matcher is None or forced else self.matcher.mask()
        return RowEdits(bias_ids, added, seen_ids, subtracted, self._repetition, forced, banned, allowed)


def _bias(bias: Mapping[int, float], vocab_size: int) -> tuple[Any, Any]:
    known = {token_id: value for token_id, value in bias.items() if 0 <= token_id < vocab_size}
    return np.array(list(known), dtype=np.int64), np.array(list(known.values()), dtype=np.float32)


class _SeenTokens:
    """The distinct ids so far, and how often the sequence has generated each."""

    def __init__(self, prompt_ids: Iterable[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        distinct = [i for i in dict.fromkeys(prompt_ids) if 0 <= i < vocab_size]
        self._slot = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = np.zeros(len(distinct) + 256, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def add(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            return
        slot = self._slot.setdefault(token_id, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def arrays(self) -> tuple[Any, Any]:
        """Ids int64 [m] and counts float32 [m], valid until the next ``add``."""
        used = len(self._slot)
        return self._ids[:used], self._counts[:used]


class _BadWords:
    """Bans the last id of a bad word while the ids before it are the last ones of prompt and answer."""

    def __init__(
        self, words: Sequence[Sequence[int]], prompt_ids: Sequence[int], vocab_size: int, end_ids: set[int]
    ) -> None:
        usable = [tuple(word) for word in words if word and 0 <= word[-1] < vocab_size]
        usable = [word for word in usable if len(word) > 1 or word[0] not in end_ids]
        self._always = sorted({word[0] for word in usable if len(word) == 1})
        self._after = [(word[:-1], word[-1]) for word in usable if len(word) > 1]
        self._reach = max((len(prefix) for prefix, _ in self._after), default=0)
        self._recent = tuple(prompt_ids[-self._reach :]) if self._reach else ()

    def add(self, token_id: int) -> None:
        if self._reach:
            self._recent = (*self._recent, token_id)[-self._reach :]

    def banned(self) -> list[int]:
        completed = [last for prefix, last in self._after if self._recent[-len(prefix) :] == prefix]
        return self._always + completed
