"""Holds the sampling state of a sequence: its parameters, its adjustments and its random numbers.

Knows nothing of batches; it computes no token.
"""

from __future__ import annotations

from mlserver_torch_stream.engine.sampling.logit_adjuster import LogitAdjuster
from mlserver_torch_stream.engine.sampling.noise import derive_key
from mlserver_torch_stream.types import SamplingParameters


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
