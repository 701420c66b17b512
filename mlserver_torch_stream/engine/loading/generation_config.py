"""Reads a model's ``generation_config.json``: defaults for requests, rules for tokens, and fields without effect.

Fields that have no effect here are reported by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from mlserver_torch_stream.types import GenerationRules

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_RENAMED = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
_RULES = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")
# Fields that change no token here. Requests have ``max_tokens`` and ``n`` instead of ``max_length`` and
# ``num_return_sequences``; ``generate`` itself ignores two fields if there is no encoder; one beam has no penalty.
_HARMLESS = frozenset(
    (
        *("do_sample", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("max_length", "num_return_sequences", "renormalize_logits", "early_stopping", "length_penalty"),
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
        *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
    )
)
_ONLY_SAMPLED = ("epsilon_cutoff", "eta_cutoff", "top_h")
_OFF: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "guidance_scale": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "diversity_penalty": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "remove_invalid_values": False,
    "token_healing": False,
}


def generation_defaults(config: Any) -> dict[str, Any]:
    """Returns the defaults of the model's own generation config, under the names of request parameters.

    Default values that transformers adds for absent fields (top-k 50, …) are not included. Without ``do_sample`` the
    model is meant for greedy decoding, so the other sampling fields are ignored.
    """
    fields = _set_fields(config)
    defaults: dict[str, Any] = {}
    if fields.get("do_sample"):
        defaults = {key: fields[key] for key in _SAMPLED if key in fields}
        defaults.setdefault("temperature", 1.0)
    return defaults | {name: fields[key] for key, name in _RENAMED.items() if key in fields}


def generation_rules(config: Any) -> GenerationRules:
    """Returns the tokens that a model's ``generation_config.json`` suppresses, forbids or forces."""
    fields = _set_fields(config)
    return GenerationRules(
        suppressed=_ids(fields.get("suppress_tokens")),
        suppressed_first=_ids(fields.get("begin_suppress_tokens")),
        bad_words_ids=tuple(tuple(word) for word in fields.get("bad_words_ids", ())),
        forced_bos=_ids(fields.get("forced_bos_token_id")),
        forced_eos=_ids(fields.get("forced_eos_token_id")),
    )


def not_honoured(config: Any) -> list[str]:
    """Returns the fields, with their values, that change the results of ``generate`` but have no effect here."""
    known = {*_SAMPLED, *_RENAMED, *_RULES, *_HARMLESS}
    declared = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - known
    fields = _set_fields(config)
    if not fields.get("do_sample"):
        declared.difference_update(_ONLY_SAMPLED)
    return [f"{name} {fields[name]!r}" for name in sorted(declared & set(fields)) if fields[name] != _OFF.get(name)]


def _set_fields(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_diff_dict().items() if value is not None} if config else {}


def _ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def eos_token_ids(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the end tokens of a generation config and of the tokenizer. ``config`` may be None."""
    own = config.eos_token_id if config else None
    ids = list(own) if isinstance(own, list | tuple) else [own]
    return tuple(dict.fromkeys(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None))
