"""Refuses models that are no causal language models, by their configs, before any weight is read.

Knows no family by name. Some families of encoders have a class for causal language models too, whose output would be
without sense for the weights of an encoder.
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from mlserver_torch_stream.errors import LoadFailed

SERVED = "this server runs causal language models, such as Llama, Qwen or GPT-2"


def refuse_other_kinds(config: Any) -> None:
    """Raises LoadFailed."""
    if getattr(config, "is_encoder_decoder", False):
        raise LoadFailed(f"{_name(config)} is an encoder-decoder model; {SERVED}")
    if getattr(config, "is_decoder", None) is False and not _has_causal_weights(config):
        raise LoadFailed(f"{_name(config)} is an encoder; {SERVED}")


def _has_causal_weights(config: Any) -> bool:
    """Whether the config names the class that would be loaded, or none. Decoders, too, can say ``is_decoder`` False."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not config.architectures:
        return True  # transformers decides
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ in config.architectures


def _name(config: Any) -> str:
    architecture = next(iter(config.architectures or ()), None)
    return f"model type '{config.model_type}'" + (f" ({architecture})" if architecture else "")
