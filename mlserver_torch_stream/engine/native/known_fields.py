"""Finds the first field of a model's config that the kernels do not account for, and names the refusal.

``structure`` reads the effects of the fields off the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlserver_torch_stream.engine.config_fields import declared_fields, rope_keys
from mlserver_torch_stream.engine.failures import Unsuitable

# Fields whose effects ``structure`` reads off the modules, the rotary table off the model's rotary module, and the
# cache's layout off the config.
_READ = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
        *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias"),
        *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
        *("no_rope_layers", "no_rope_layer_interval", "rope_parameters", "rope_scaling", "rope_theta"),
        *("partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings"),
        *("layer_types", "sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
    )
)
# Fields that change no forward of a model in ``eval``: training, ids for tokenizer and sampler, bookkeeping.
_HARMLESS = frozenset(
    (
        *("initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout", "pretraining_tp"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "output_hidden_states", "return_dict"),
        *("dtype", "architectures", "transformers_version", "id2label", "label2id", "problem_type"),
    )
)
# The values that turn off other fields and keys. None turns off any of them.
_OFF: Mapping[str, Any] = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False, "llama_4_scaling_beta": 0}
# Keys that transformers' rotary modules of the static kinds read, and a length that some checkpoints repeat.
_ROPE = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    )
)


def unknown_field(config: Any) -> str | None:
    """Returns the first field or rope key that may change the model's results, with its value; None if there is none.

    Only fields that the config's class declares count: its model cannot depend on keys that a checkpoint has besides.
    """
    if getattr(config, "is_heterogeneous", False):
        return "per_layer_config"
    unknown = (name for name in declared_fields(type(config)) if name not in _READ | _HARMLESS)
    found = _first((name, getattr(config, name, None)) for name in unknown)
    return found or _first((name, value) for name, value in rope_keys(config) if name not in _ROPE)


def _first(pairs: Iterator[tuple[str, Any]]) -> str | None:
    on = ((name, value) for name, value in pairs if value is not None and value != _OFF.get(name))
    return next((f"{name} {value!r}" for name, value in on), None)


class UnsupportedLayout(Unsuitable):
    """The model is no decoder of the Llama layout; the message names the difference in one line."""
