"""Converts a request's sampling parameters and constraint to vLLM's format, and refuses parameters that vLLM lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import GenerationRules, SamplingParameters

_MAX_TEMPERATURE = 2.0
_AS_THEY_ARE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def check_sampling(sampling: SamplingParameters) -> None:
    """Raises InvalidInput for a parameter that vLLM does not have."""
    if sampling.typical_p != 1.0:
        raise InvalidInput("typical_p", "is not implemented by vLLM, which generates this model's tokens")
    if sampling.temperature > _MAX_TEMPERATURE:
        raise InvalidInput("temperature", f"must be at most 2 with vLLM, got {sampling.temperature}")


class SamplingWriter:
    """Converts parameters for one model, whose generation config has these ``rules``.

    A generation config or a tokenizer can have ids outside the model's vocabulary. Such ids are left out: the model
    never generates them, but vLLM would refuse the request, or its engine core would die.
    """

    def __init__(self, codec: TextCodec, rules: GenerationRules, vocab_size: int) -> None:
        self._codec = codec
        self._vocab = range(vocab_size)
        self._banned = [*([token_id] for token_id in rules.suppressed), *map(list, rules.bad_words_ids)]

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidInput for a request whose sampling parameters vLLM does not support."""
        check_sampling(request.sampling)

    def params(self, request: RequestState) -> dict[str, Any]:
        """Returns fields of vLLM's ``SamplingParams``, with the seed of the request's first sequence."""
        given = request.params
        ends = set(request.end_ids)
        if request.input.constraint is not None:  # after a constraint vLLM allows only the tokenizer's end token
            ends.update(request.input.constraint.eos_ids)
        params: dict[str, Any] = {name: getattr(given, name) for name in _AS_THEY_ARE}
        params |= {
            "max_tokens": max(request.max_tokens, 1),  # vLLM cannot generate no token
            "min_tokens": min(given.min_tokens, request.max_tokens),
            "ignore_eos": True,  # the end tokens are among these
            "stop_token_ids": sorted(token_id for token_id in ends if token_id in self._vocab),
        }
        if given.seed is not None:
            params["seed"] = given.seed
        if given.logprobs:
            params["logprobs"] = given.top_logprobs
        if given.prompt_logprobs is not None:
            # At least 1: with its ``kv_sharing_fast_prefill`` vLLM refuses 1, but with 0 its engine core would die.
            params["prompt_logprobs"] = max(given.prompt_logprobs, 1)
        if given.logit_bias:
            params["logit_bias"] = {str(token_id): bias for token_id, bias in given.logit_bias.items()}
        return params

    def bad_words(self, request: RequestState) -> Sequence[Sequence[int]]:
        """Returns the token ids of the request's bad words and of the generation config's bad words."""
        words = self._codec.bad_words_ids(request.params.bad_words) if request.params.bad_words else ()
        return [word for word in (*self._banned, *words) if all(token_id in self._vocab for token_id in word)]


def as_lark(grammars: str) -> str:
    """Converts llguidance's JSON to one grammar in Lark's language. The answer after the reasoning is a
    nested grammar.
    """
    first, *rest = json.loads(grammars)["grammars"]
    if rest:
        return f"{first['lark_grammar'].replace('@answer', 'answer', 1)}\n{_nested(rest[0])}"
    return str(first["lark_grammar"]) if "lark_grammar" in first else f"start: answer\n{_nested(first)}"


def _nested(grammar: dict[str, Any]) -> str:
    if "json_schema" in grammar:
        return f"answer: %json {json.dumps(grammar['json_schema'])}\n"
    return f"answer: %lark {{\n{grammar['lark_grammar']}\n}}\n"
