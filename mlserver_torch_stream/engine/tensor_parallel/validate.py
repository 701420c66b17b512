"""Refuses models that cannot be split over ranks, and settings that exclude ranks, before any rank is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.engine.config_fields import layer_configs
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed

KEY = "parameters.extra.tensor_parallel_size"
# The allowed values of other settings: a rank has one device and plain weights, and follows a batched engine.
_NEEDS: Mapping[str, tuple[Any, ...]] = {
    "device_map": (None,),
    "max_memory": (None,),
    "offload_folder": (None,),
    "quantization_config": (None,),
    "weights": ("auto",),
    "engine": ("auto", "batched"),
}


def check_settings(settings: EngineSettings) -> None:
    """Raises LoadFailed if a setting does not allow ranks; the error names the setting."""
    for key, allowed in _NEEDS.items():
        value = getattr(settings, key)
        if value not in allowed:
            raise LoadFailed(f"{KEY}: {settings.tensor_parallel_size} cannot be combined with {key}: {value!r}")


def check_launched(sizes: Mapping[str, int], started: int) -> None:
    """Raises LoadFailed if the number of ranks that were started for a server does not fit its models.

    ``sizes`` maps each model's name to its number of ranks. A server without models may load one later.
    """
    for name, size in sizes.items():
        if size not in (1, started):
            raise LoadFailed(f"{KEY}: model {name!r} needs {size} ranks, but {started} were started")
    if sizes and started not in sizes.values():
        names = ", ".join(map(repr, sizes))
        raise LoadFailed(
            f"{KEY}: {started} ranks were started, but no model ({names}) is split over them: set it to {started}"
        )


def check_model(config: Any, size: int) -> None:
    """Raises LoadFailed if transformers cannot give each of ``size`` ranks whole attention heads of the model."""
    if getattr(config, "quantization_config", None):
        raise LoadFailed(f"{KEY}: this checkpoint is quantised, and ranks cannot split quantised weights")
    text = config.get_text_config(decoder=True)
    layers = layer_configs(text)
    heads = math.gcd(*(n if isinstance(n := getattr(each, "num_attention_heads", None), int) else 0 for each in layers))
    if not getattr(text, "base_model_tp_plan", None) or not heads:
        raise LoadFailed(f"{KEY}: transformers has no plan that splits models of type {text.model_type}")
    kv_heads = math.gcd(*(getattr(each, "num_key_value_heads", None) or heads for each in layers))
    common = math.gcd(heads, kv_heads)
    if common % size:
        allowed = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise LoadFailed(
            f"{KEY}: {size} does not divide the model's {heads} attention heads and {kv_heads} key-value heads; "
            f"allowed here: {allowed}"
        )
