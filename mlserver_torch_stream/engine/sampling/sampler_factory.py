"""Makes the sampling state of each new row from its request's parameters.

Knows nothing of logits.
"""

from __future__ import annotations

import secrets

from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.sampling.generation_rules import GenerationRules
from mlserver_torch_stream.engine.sampling.sampler import RowSampler
from mlserver_torch_stream.engine.text.tokenizer import TextCodec


class SamplerFactory:
    """Makes the sampling state of each new row."""

    def __init__(
        self,
        codec: TextCodec,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        rules: GenerationRules | None = None,
    ) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rules = rules

    def begin(self, request: RequestState) -> list[RowSampler]:
        params = request.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        bad_words = self._codec.bad_words_ids(params.bad_words) if params.bad_words else ()
        eos = self._eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        samplers = []
        for number, sequence in enumerate(request.sequences):
            sequence.sampler = RowSampler(
                params,
                prompt_ids=request.prompt,
                vocab_size=self._vocab_size,
                eos_token_ids=eos,
                seed=seed,
                sample_index=number,
                bad_words_ids=bad_words,
                rules=self._rules,
                max_tokens=request.max_tokens,
            )
            samplers.append(sequence.sampler)
        return samplers
