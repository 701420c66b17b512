"""Holds the sampling state of one sequence, and makes its random numbers by a hash.

A row's noise depends on its own counters only, so it is the same alone, in any
batch and on any device; the hash is splitmix64, whose finaliser passes the usual test batteries.
"""

from __future__ import annotations

import torch

from mlserver_torch_stream.engine.devices import from_host
from mlserver_torch_stream.engine.sampling.logit_adjuster import LogitAdjuster
from mlserver_torch_stream.types import SamplingParameters

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_SMALLEST = 2.0**-63
_LARGEST = 1.0 - 2.0**-24  # the float32 below 1: log1p(-u) stays finite


def _signed(value: int) -> int:
    """Returns the same 64 bits as two's complement, as torch has no unsigned type."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> _SHIFTS[2])


def derive_key(key: int, part: int) -> int:
    """Returns a 64-bit key for ``part`` (any integer, taken modulo 2**64) below ``key``."""
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
    # log1p of a small number keeps the resolution that rare tokens need; log of a number close to 1 would not.
    uniform = _shift(bits, 1).float().mul_(_SMALLEST).clamp_(_SMALLEST, _LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts right logically: torch's own shift copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


class RowSampler:
    """One sequence's sampling state. 0 turns ``top_k`` and ``min_p`` off, 1 turns ``top_p`` and ``typical_p`` off.

    ``adjuster`` changes the logits first. ``seed`` is any integer, taken modulo 2**64. ``sample_index`` is the
    sequence's number among the n of its request, so that they differ under one seed. A row that ``takes_argmax`` gets
    the first of its largest logits and no log-probability; one that is ``drawn_unchanged`` is drawn from its logits as
    they are, without a log-probability.
    """

    def __init__(
        self, params: SamplingParameters, adjuster: LogitAdjuster, vocab_size: int, seed: int, sample_index: int
    ) -> None:
        self.vocab_size = vocab_size
        self.adjuster = adjuster
        self.matcher = adjuster.matcher  # of the sequence's constraint; None without a constraint
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
        """The next token, where it is known without logits."""
        return None if self.wants_logprob else self.adjuster.only_token

    @property
    def noise_key(self) -> int:
        """The key of this position's random numbers."""
        return derive_key(self._key, self._position)

    def accept(self, token_id: int) -> None:
        """Records a chosen token: call it once for each, in order."""
        self._position += 1
        self.adjuster.accept(token_id)
