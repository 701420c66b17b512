"""Holds the sampling state of one sequence: the changes to its logits, and its random numbers, which are hashes.

The changes to logits are the bias, penalties, bad words, the minimum length and the model's own rules. A row's noise
depends only on the row's seed and position, so it is the same in every batch and on every device. The hash is
splitmix64, whose finaliser passes the usual tests of randomness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from mlserver_torch_stream.engine.constraints.token_matcher import TokenMask, TokenMatcher
from mlserver_torch_stream.engine.devices import from_host, sent
from mlserver_torch_stream.types import GenerationRules, SamplingParameters

_Ids = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]
NO_IDS: _Ids = np.zeros(0, dtype=np.int64)
NO_FLOATS: _Floats = np.zeros(0, dtype=np.float32)
NO_TOKEN = -1
FEW = 128  # a row with fewer allowed tokens is sampled from a table of these tokens
_BITS = (np.arange(256)[:, None] >> np.arange(8)) & 1  # the bits of each byte of a mask
_CEILINGS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The changes to a row's logits, applied in this order.

    ``added`` are the biases of ``bias_ids``. A positive logit of ``seen_ids`` is divided by ``repetition``, and a
    negative logit is multiplied by it; then ``subtracted`` is subtracted. If ``forced`` or ``allowed`` is given, all
    other ids get -inf.
    """

    bias_ids: _Ids
    added: _Floats
    seen_ids: _Ids
    subtracted: _Floats
    repetition: float
    forced: Sequence[int]
    banned: Sequence[int]
    allowed: TokenMask | None = None


def few_allowed(edits: RowEdits | None, vocab_size: int) -> _Ids | None:
    """Returns the tokens that a row's mask allows, int64 [FEW], padded with ``NO_TOKEN``.

    Returns None if the mask allows ``FEW`` tokens or more, or if the row has other changes. If there were exactly
    ``FEW`` tokens, the last token would get its own noise here; in a whole row, that token is not a candidate (see
    ``candidates.py``).
    """
    if edits is None or edits.allowed is None or any(map(len, (edits.bias_ids, edits.seen_ids, edits.banned))):
        return None
    if np.count_nonzero(edits.allowed) >= FEW:
        return None
    nonzero = np.flatnonzero(edits.allowed)
    byte, bit = np.nonzero(_BITS[edits.allowed[nonzero]])
    known = 8 * nonzero[byte] + bit
    known = known[known < vocab_size]
    if len(known) >= FEW:
        return None
    ids = np.full(FEW, NO_TOKEN, dtype=np.int64)
    ids[: len(known)] = known
    return ids


def adjust_rows(work: torch.Tensor, rows: Sequence[int], edits: Sequence[RowEdits]) -> None:
    """Changes these rows of ``work`` (float32 [n, vocab_size], writable) in place."""
    if indices := _indices(work, rows, [each.bias_ids for each in edits]):
        work[indices] += _sent(work, np.concatenate([each.added for each in edits]))
    if indices := _indices(work, rows, [each.seen_ids for each in edits]):
        work[indices] = _penalised(work[indices], edits)
    if forced := [row for row, each in zip(rows, edits, strict=True) if each.forced]:
        work.index_fill_(0, from_host(forced, work.device), -torch.inf)
    _fill(work, rows, [each.forced for each in edits], 0.0)
    _exclude(work, {row: each.allowed for row, each in zip(rows, edits, strict=True) if each.allowed is not None})
    _fill(work, rows, [each.banned for each in edits], -torch.inf)


def _penalised(values: torch.Tensor, edits: Sequence[RowEdits]) -> torch.Tensor:
    counts = [len(each.seen_ids) for each in edits]
    repetition = np.repeat(np.array([each.repetition for each in edits], dtype=np.float32), counts)
    factors = _sent(values, np.stack([repetition, np.concatenate([each.subtracted for each in edits])]))
    return torch.where(values < 0, values * factors[0], values / factors[0]) - factors[1]


def _fill(work: torch.Tensor, rows: Sequence[int], ids: Sequence[Sequence[int]], value: float) -> None:
    if indices := _indices(work, rows, ids):
        work[indices] = torch.full((), value, dtype=work.dtype, device=work.device)


def _exclude(work: torch.Tensor, allowed: Mapping[int, TokenMask]) -> None:
    """Sets the logits of tokens outside of each row's mask to -inf."""
    if not allowed:
        return
    width = work.shape[1]
    if work.device.type == "cpu":
        for row, mask in allowed.items():  # four times as fast as unpacking bits that say where -inf goes
            logits = work[row].numpy()
            np.minimum(logits, _CEILINGS.take(mask, axis=0).ravel()[:width], out=logits)
        return
    masks = _sent(work, np.stack(list(allowed.values())))
    bits = (masks[:, :, None] >> torch.arange(8, device=work.device, dtype=torch.uint8)) & 1
    indices = from_host(list(allowed), work.device)
    work[indices] = work[indices].masked_fill_(bits.flatten(1)[:, :width] == 0, -torch.inf)


def _indices(
    work: torch.Tensor, rows: Sequence[int], ids: Sequence[Sequence[int] | _Ids]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the indices into ``work`` of all ids of all rows; None if there are no ids."""
    counts = [len(each) for each in ids]
    if not any(counts):
        return None
    pairs = np.stack([np.repeat(np.array(rows), counts), np.concatenate([np.asarray(each, np.int64) for each in ids])])
    first, second = _sent(work, pairs)
    return first, second


def _sent(like: torch.Tensor, array: np.ndarray[Any, Any]) -> torch.Tensor:
    return sent(torch.from_numpy(array), like.device)


class RowRules:
    """The model's rules for one sequence, applied in the order of transformers' ``generate``."""

    def __init__(self, rules: GenerationRules, prompt: int, max_tokens: int | None, vocab_size: int) -> None:
        """``prompt`` is the number of prompt tokens. ``max_tokens`` is None if the sequence's length is not limited."""

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
        """Returns whether there is any rule for any position."""
        return bool(self._always) or any((*self._forced.values(), *self._suppressed.values()))

    def of(self, position: int) -> tuple[list[int], list[int]]:
        """Returns the forced and the suppressed ids for the sequence's token at ``position``; both may be empty."""
        return self._forced.get(position, []), self._always + self._suppressed.get(position, [])


class LogitAdjuster:
    """The adjustments of one sequence, in transformers' order.

    The adjustments are the bias, the repetition penalty (for prompt and generated tokens), presence and frequency
    penalties (for generated tokens), bad words, the exclusion of ``end_ids`` before ``min_tokens``, and the model's own
    ``rules``, for which ``max_tokens`` is needed. Ids at or above ``vocab_size`` are ignored. A ``matcher`` excludes
    the tokens that its constraint does not allow; the constraint takes precedence over tokens that the model's rules
    force.
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
        """The token that the constraint forces; None if there is a choice or the token is banned."""
        if self.matcher is None or not self.matcher.forced:
            return None
        forced, _ = self._forced_and_banned()
        return forced[0] if forced else None

    def _forced_and_banned(self) -> tuple[Sequence[int], Sequence[int]]:
        forced, banned = self._rules.of(self._accepted)
        if self.matcher is None and forced:  # the model's rules allow no other token
            return forced, banned
        banned = [*banned, *(self._bad_words.banned() if self._bad_words is not None else ())]
        banned += self._end_ids if self._accepted < self._min_tokens else []
        next_forced = () if self.matcher is None else islice(self.matcher.forced, 1)
        return [token_id for token_id in next_forced if token_id not in banned], banned

    def edits(self) -> RowEdits | None:
        """Returns the changes to the sequence's next logits before sampling; None means no change."""
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
    """The distinct ids of the sequence so far, and how often it has generated each of them."""

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
        """Returns ids, int64 [m], and counts, float32 [m], which are valid until the next ``add``."""
        used = len(self._slot)
        return self._ids[:used], self._counts[:used]


class _BadWords:
    """Bans the last id of a bad word as long as the text so far ends with the word's other ids."""

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


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_SMALLEST = 2.0**-63
_LARGEST = 1.0 - 2.0**-24  # the float32 below 1: log1p(-u) stays finite


def _signed(value: int) -> int:
    """Returns the same 64 bits as a signed number in two's complement, because torch has no unsigned type."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> _SHIFTS[2])


def derive_key(key: int, part: int) -> int:
    """Derives a 64-bit key from ``key`` and ``part``, which may be any integer and is taken modulo 2**64."""
    return _mix((key ^ _mix(part + _GOLDEN)) + _GOLDEN)


def gumbel(keys: list[int], ids: torch.Tensor) -> torch.Tensor:
    """Returns standard Gumbel noise for each (key, id).

    ``keys`` are n integers of 64 bits, ``ids`` int64 [n, c], or [c] for the same ids in every row. The noise is float32
    [n, c].
    """
    column = from_host([_signed(key) for key in keys], ids.device)[:, None]
    bits = (ids + 1) * _signed(_GOLDEN) + column
    bits = bits.bitwise_xor_(_shift(bits, _SHIFTS[0])).mul_(_signed(_MULTIPLIERS[0]))
    bits = bits.bitwise_xor_(_shift(bits, _SHIFTS[1])).mul_(_signed(_MULTIPLIERS[1]))
    bits = bits.bitwise_xor_(_shift(bits, _SHIFTS[2]))
    # log1p of a small number has the resolution that rare tokens need; log of a number close to 1 does not.
    uniform = _shift(bits, 1).float().mul_(_SMALLEST).clamp_(_SMALLEST, _LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts right logically: torch's own shift copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


class RowSampler:
    """One sequence's sampling state.

    ``top_k`` and ``min_p`` are off if they are 0; ``top_p`` and ``typical_p`` are off if they are 1. ``adjuster``
    changes the logits before sampling. ``seed`` is any integer and is taken modulo 2**64. ``sample_index`` is the
    sequence's number among the n sequences of its request, which get different tokens under the same seed. A row that
    ``takes_argmax`` gets the token of its first largest logit, without a log-probability; a row that is
    ``drawn_unchanged`` is drawn from its unchanged logits, also without a log-probability.
    """

    def __init__(
        self, params: SamplingParameters, adjuster: LogitAdjuster, vocab_size: int, seed: int, sample_index: int
    ) -> None:
        self.vocab_size = vocab_size
        self.adjuster = adjuster
        self.matcher = adjuster.matcher  # None without a constraint
        self.greedy = params.greedy
        self.temperature = params.temperature
        self.top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self.top_p = min(params.top_p, 1.0)
        self.min_p = params.min_p
        self.typical_p = params.typical_p
        self.wants_logprob = params.logprobs or params.top_logprobs > 0
        self.top_logprobs = min(params.top_logprobs, vocab_size)
        unchanged = adjuster.never_edits and not self.wants_logprob
        self.takes_argmax = unchanged and params.greedy
        self.drawn_unchanged = unchanged and not params.greedy
        self._key = derive_key(derive_key(0, seed), sample_index)
        self._position = 0

    @property
    def only_token(self) -> int | None:
        """The next token, if it is known without logits; otherwise None."""
        return None if self.wants_logprob else self.adjuster.only_token

    @property
    def noise_key(self) -> int:
        """The key of this position's random numbers."""
        return derive_key(self._key, self._position)

    def accept(self, token_id: int) -> None:
        """Records a chosen token. Call it once for each token, in order."""
        self._position += 1
        self.adjuster.accept(token_id)
