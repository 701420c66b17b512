"""Makes the sampling state of each new sequence from its request's parameters."""

from __future__ import annotations

import secrets

from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.sampling.logit_adjuster import GenerationRules, LogitAdjuster
from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler
from mlserver_torch_stream.engine.text.tokenizer import TextCodec


class SamplerFactory:
    """Gives each sequence of a request its ``RowSampler``."""

    def __init__(self, codec: TextCodec, vocab_size: int, rules: GenerationRules | None = None) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._rules = rules

    def begin(self, request: RequestState) -> None:
        params = request.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        bad_words = self._codec.bad_words_ids(params.bad_words) if params.bad_words else ()
        for number, sequence in enumerate(request.sequences):
            adjuster = LogitAdjuster(
                params,
                prompt_ids=request.prompt,
                vocab_size=self._vocab_size,
                end_ids=request.end_ids,
                bad_words_ids=bad_words,
                rules=self._rules,
                max_tokens=request.max_tokens,
                matcher=None if request.constraint is None else request.constraint.matcher(request.end_ids),
            )
            sequence.sampler = RowSampler(params, adjuster, self._vocab_size, seed, number)
