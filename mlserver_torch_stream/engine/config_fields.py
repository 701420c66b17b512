"""Reads a model's config: its declared fields, rope parameters, lengths and maximum position."""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import transformers
from transformers import PreTrainedConfig

from mlserver_torch_stream.errors import LoadFailed

# Names of lengths at which the treatment of positions changes: windows, chunks, and scaling.
_LENGTH = re.compile(r"window|chunk|block_size|original_max|context|floor_scale|local_attention")
_CONNECT_S = 10.0
_NO_LENGTH = re.compile(r"layers|pattern|^num_|^use_")


def read_config(name: str, location: str, gguf_file: Path | None = None, **options: Any) -> Any:
    """Reads the config of a folder, a hub id or a GGUF file. Raises LoadFailed, whose text calls the model ``name``."""
    if gguf_file is None and not os.path.isdir(location):
        check_hub(location, options.get("revision"))
    try:
        if gguf_file is not None:
            from mlserver_torch_stream.engine.loading.gguf_model import read_gguf_config  # here: gguf takes 5 MB

            return read_gguf_config(gguf_file)
        return transformers.AutoConfig.from_pretrained(location, **options)
    except (OSError, ValueError) as error:
        raise LoadFailed(f"cannot read the config of {name}: {' '.join(str(error).split())[:300]}") from error


def check_hub(hub_id: str, revision: str | None) -> None:
    """Raises LoadFailed if the hub cannot be reached and the model is not in its cache.

    huggingface_hub itself would try for half a minute, for each of several files. Behind a proxy only huggingface_hub
    itself can check.
    """
    from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache  # here: its httpx takes memory
    from huggingface_hub.errors import HFValidationError

    try:
        if is_offline_mode() or getproxies() or try_to_load_from_cache(hub_id, "config.json", revision=revision):
            return
    except HFValidationError:
        return  # not a hub id: reading its config says what is wrong
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), _CONNECT_S).close()
    except OSError as error:
        where = (
            f"it is neither a file or folder here nor in the hub's cache, and {constants.ENDPOINT} cannot be reached"
        )
        raise LoadFailed(f"cannot load {hub_id}: {where}: {error}") from error


def plain_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns these fields as a plain config: a family's own config class would import transformers' modeling code."""
    config = PreTrainedConfig()
    vars(config).update(values)
    return config


def declared_fields(config_class: type) -> list[str]:
    """Returns the fields of a dataclass, such as transformers' own configs, or else the arguments of ``__init__``."""
    names = [each.name for each in fields(config_class)] if is_dataclass(config_class) else []
    for each in config_class.__mro__:
        if "__init__" in vars(each) and issubclass(each, PreTrainedConfig):
            parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
            names += [
                parameter.name
                for parameter in parameters
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            ]
    return [name for name in dict.fromkeys(names) if name != "self"]


def rope_keys(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items of the rope parameters of one rope, or of several ropes if each kind of layer has its own."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        if isinstance(rope, Mapping):
            yield from rope.items()


def named_lengths(config: Any) -> set[int]:
    """Returns all lengths in tokens that a decoder's config has for any of its layers."""
    names = declared_fields(type(config))
    values = [(name, getattr(layer, name, None)) for layer in layer_configs(config) for name in names]
    return {length for name, value in (*values, *rope_keys(config)) for length in _lengths(name, value)}


def layer_configs(config: Any) -> Sequence[Any]:
    """Returns the config of each layer if layers differ, as in Gemma 4; otherwise returns the model's config.

    If layers differ, some fields have no value in the model's config, and reading them raises an error.
    """
    layers: Sequence[Any] = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return layers


def _lengths(name: str, value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _lengths(str(key), inner)
    elif _LENGTH.search(name) and not _NO_LENGTH.search(name):
        values = value if isinstance(value, list | tuple) else [value]
        yield from (length for length in values if type(length) is int and length > 1)


logger = logging.getLogger(__name__)

# The context of models without a limit (recurrent ones, alibi): admission needs a number.
UNLIMITED_CONTEXT = 32768
_LIMITS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")


def max_model_len(model: Any, setting: int | None) -> int:
    """Returns the maximum length of a sequence, prompt included; ``setting`` is the setting ``max_model_len``."""
    own = _own_limit(model.config)
    if own is None:
        return setting or UNLIMITED_CONTEXT
    if setting is not None and setting > own:
        logger.warning("max_model_len %d is more than the model's %d positions: using %d", setting, own, own)
    first = _first_length(_long_ropes(model.config))
    if setting is None and first is not None and first < own:
        logger.warning(
            "The model rescales its positions beyond %d tokens: using %d of %d. With a larger max_model_len it "
            "rescales the positions of shorter sequences in the same way",
            *(first, first, own),
        )
        return first
    return min(own, setting or own)


def comparable_context(model: Any) -> int:
    """Returns the maximum length of a sequence in a batch, independently of the settings."""
    limits = (_own_limit(model.config), steady_positions(model))
    return min((limit for limit in limits if limit is not None), default=UNLIMITED_CONTEXT)


def _own_limit(config: Any) -> int | None:
    """Returns the model's own maximum length; None if there is none. XLNet's config has -1 for no maximum."""
    config = config.get_text_config(decoder=True)
    lengths = (getattr(config, key, None) for key in _LIMITS)
    return next((limit for limit in lengths if isinstance(limit, int) and limit > 0), None)


def steady_positions(model: Any) -> int | None:
    """Returns the length up to which a position's embedding depends only on the position; None if there is no limit.

    Beyond that length, transformers scales the positions of all rows in a call by the length of the longest row
    ("longrope"), but tokens that are already in the cache keep the old scale. So batches and chunked prefill would give
    wrong tokens.
    """
    return _first_length([rope for rope in _long_ropes(model.config) if rope["short_factor"] != rope["long_factor"]])


def settle_positions(config: Any, setting: int | None) -> bool:
    """Gives a "longrope" model the same factors for sequences of all lengths.

    Returns whether the config has such ropes. ``setting`` is the setting ``max_model_len``. If the setting exceeds a
    rope's original length, the rope's long factors apply, as in vLLM and llama.cpp: sequences beyond that length have
    the same logits as in transformers, and shorter sequences have different logits. Without such a setting the short
    factors apply, and ``max_model_len`` limits the context to the original length.
    """
    longest = min(setting or 0, _own_limit(config) or UNLIMITED_CONTEXT)
    ropes = _long_ropes(config)
    for rope in ropes:
        chosen = "long_factor" if rope[_FIRST_LENGTH] < longest else "short_factor"
        rope["short_factor"] = rope["long_factor"] = rope[chosen]
    return bool(ropes)


_FIRST_LENGTH = "original_max_position_embeddings"


def _first_length(long_ropes: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the smallest length beyond which one of these ropes uses its long factors; None without ropes."""
    return min([rope[_FIRST_LENGTH] for rope in long_ropes], default=None)


def _long_ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of the ropes that may have different factors for long and for short sequences."""
    rope: dict[str, Any] = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # for all layers, or by their type
    return [kind for kind in kinds if kind.get("rope_type") == "longrope"]
