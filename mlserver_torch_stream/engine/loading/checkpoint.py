"""Checks a checkpoint: its files before the weights are loaded, and the weights afterwards.

Model files are not trusted: a checkpoint with an error is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from mlserver_torch_stream.engine.loading.file_damage import FLOATS, StoredTensor, damage_of, read_header
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.settings_file import read_json
from mlserver_torch_stream.work_threads import raise_if_cancelled

logger = logging.getLogger(__name__)

Tensors = Mapping[str, StoredTensor]

_OTHER_CONFIGS = ("generation_config.json", "tokenizer_config.json")
_MAX_DEPTH = 64  # levels of a JSON file; libraries walk it recursively
_MAX_JSON_BYTES = 2**25  # an index of 200,000 weights has 22 MB
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_SIZES = (*_LAYERS, *_WIDTHS, "vocab_size", "num_attention_heads", "n_head", "num_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SCALE = re.compile(r"(?:scales?|scale_inv|qweight|qzeros)$")


def check_folder(folder: Path) -> Tensors:
    """Checks a folder's JSON files and headers. Returns the folder's tensors; none if the weights are pickles.

    Raises LoadFailed if a file is wrong; the error names the file and the field.
    """
    config = _read_object(folder / "config.json")
    for name in _OTHER_CONFIGS:
        if (folder / name).is_file():
            _read_object(folder / name)
    for fields in _levels(config):
        _check_sizes(fields)
        _check_quantisation(fields)
    tensors = {name: tensor for file in _named_files(folder, config) for name, tensor in _header(file).items()}
    if tensors:
        check_layers(config, len(tensors))
        _check_stored(config, tensors)
    return tensors


def check_layers(config: Mapping[str, Any], tensors: int) -> None:
    """Refuses a config with more layers than the checkpoint has tensors. Raises LoadFailed."""
    for fields in _levels(config):
        for name in _LAYERS:
            _check_room(fields, name, 1, tensors, f"{tensors:,} tensors")


def check_bytes(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Refuses a config whose vocabulary or experts would need more bytes than the checkpoint has. Raises LoadFailed."""
    bits = sum(tensor.bits for tensor in tensors.values())
    for fields in _levels(config):
        width = next((fields[name] for name in _WIDTHS if type(fields.get(name)) is int), 1)
        for name, bits_each in (("vocab_size", width), *((name, 1) for name in _EXPERTS)):
            _check_room(fields, name, bits_each, bits, f"{bits // 8:,} bytes")


def check_model(model: nn.Module, tensors: Tensors, quantised: bool) -> None:
    """Compares a model on the meta device with the tensors of its checkpoint. Raises LoadFailed if they do not fit."""
    parameters = dict(model.named_parameters())
    bits = sum(tensor.bits for tensor in tensors.values())
    wanted = sum(parameter.numel() for parameter in parameters.values())
    for name, parameter in () if quantised else parameters.items():
        stored = tensors.get(name)
        if stored is None:
            continue
        if stored.shape != tuple(parameter.shape):
            raise LoadFailed(_mismatch(name, stored.shape, parameter.shape))
        if parameter.is_floating_point() and stored.dtype not in FLOATS:
            raise LoadFailed(
                f"{name} is stored as {stored.dtype}, but config.json has no quantization_config that says how to "
                "read it"
            )
    if wanted > bits:
        raise LoadFailed(
            f"config.json asks for {wanted:,} parameters, but the checkpoint holds only {bits // 8:,} bytes"
        )


def check_loaded(model: nn.Module, info: Mapping[str, Collection[Any]], quantised: bool) -> None:
    """Checks transformers' report of a load, its ``output_loading_info``. Raises LoadFailed.

    An unused tensor is refused if other weights are wrong without it; scales and biases are such tensors. One warning
    names all other unused tensors.
    """
    if missing := sorted(info["missing_keys"]):
        raise LoadFailed(f"the checkpoint lacks the weights {_first_names(missing)}")
    if mismatched := sorted(info["mismatched_keys"], key=str):
        raise LoadFailed(_mismatch(*mismatched[0]))
    unexpected = sorted(info["unexpected_keys"])
    modules = dict(model.named_modules())
    needed = [name for name in unexpected if _is_needed(name, modules, quantised)]
    if needed:
        raise LoadFailed(
            f"the checkpoint holds {_first_names(needed)}, which the model does not use: config.json does not describe "
            "these weights"
        )
    if unexpected:
        logger.warning("The checkpoint holds weights that the model does not use: %s", _first_names(unexpected))


def check_finite(model: nn.Module) -> None:
    """Raises LoadFailed if a weight has infinite values or NaN. Weights offloaded to disk are not read."""
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            raise_if_cancelled()
            # One of several ranks holds only a part of a weight. Quantised weights are other kinds of tensors.
            weight = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            dense = type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point()
            if not dense or weight.dtype.itemsize == 1 or weight.is_meta or not weight.numel():
                continue
            if not all(bool(end.isfinite()) for end in torch.aminmax(weight)):
                raise LoadFailed(f"{name} holds infinite values or NaN")


def _levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the config and, if it contains one, the config of its language model."""
    yield config
    if isinstance(nested := config.get("text_config"), Mapping):
        yield nested


def _check_room(fields: Mapping[str, Any], name: str, bits_each: int, room: int, what: str) -> None:
    count = fields.get(name)
    if type(count) is int and count * bits_each > room:
        raise LoadFailed(f"config.json: {name} is {count:,}, but the checkpoint holds only {what}")


def _read_object(file: Path) -> dict[str, Any]:
    if file.is_file() and (size := file.stat().st_size) > _MAX_JSON_BYTES:
        raise LoadFailed(f"{file} has {size:,} bytes; at most {_MAX_JSON_BYTES:,} are read")
    if (damage := damage_of(file)) is not None:
        raise LoadFailed(damage)
    try:
        value = read_json(file)
    except SettingsError as error:
        raise LoadFailed(str(error)) from None
    if not isinstance(value, dict):
        raise LoadFailed(f"{file}: must contain a JSON object")
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return value
    raise LoadFailed(f"{file}: is nested too deeply; at most {_MAX_DEPTH} levels are read")


def _check_sizes(fields: Mapping[str, Any]) -> None:
    for name in (*_SIZES, *_EXPERTS):
        value = fields.get(name)
        fewest = 0 if name in _EXPERTS else 1
        for size in value if isinstance(value, list) else [] if value is None else [value]:
            if type(size) is not int or size < fewest:
                raise LoadFailed(f"config.json: {name} must be at least {fewest}, not {str(size)[:40]}")


def _check_quantisation(fields: Mapping[str, Any]) -> None:
    own = fields.get("quantization_config")
    if own is None:
        return
    if not isinstance(own, Mapping):
        raise LoadFailed("config.json: quantization_config must be an object")
    if own.get("quant_method") is None and not own.get("load_in_4bit") and not own.get("load_in_8bit"):
        raise LoadFailed("config.json: quantization_config has no quant_method, which says how to read the weights")


def _check_stored(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Refuses dense weights if the config declares quantised weights, and quantised weights if it does not."""
    own = next((fields["quantization_config"] for fields in _levels(config) if fields.get("quantization_config")), None)
    if own is None:
        packed = next((name for name, tensor in tensors.items() if re.match(r"F([68]_|4$)", tensor.dtype)), None)
        if packed is not None:
            raise LoadFailed(
                f"{packed} is stored as {tensors[packed].dtype}, but config.json has no quantization_config that says "
                "how to read it"
            )
    elif "bitsandbytes" in str(own.get("quant_method", "bitsandbytes")) and all(
        tensor.dtype in FLOATS for tensor in tensors.values()
    ):
        name = max(tensors, key=lambda name: tensors[name].elements)
        raise LoadFailed(
            "config.json: quantization_config says that bitsandbytes has quantised the weights, but all of them are "
            f"dense, such as {name} as {tensors[name].dtype}; remove quantization_config from config.json"
        )


def weight_files(folder: Path) -> Sequence[Path]:
    """Returns the safetensors files that transformers reads; none if the weights are pickles.

    Raises LoadFailed if the config or an index is wrong.
    """
    return _named_files(folder, _read_object(folder / "config.json"))


def _named_files(folder: Path, config: Mapping[str, Any]) -> Sequence[Path]:
    named = config.get("transformers_weights")
    if named is not None and not (isinstance(named, str) and _stays_inside(named)):
        raise LoadFailed(f"config.json: transformers_weights must name a file of the folder, not {str(named)[:200]!r}")
    for name in (named,) if named else (_WEIGHTS, _INDEX):
        if (folder / name).is_file():
            files = _shards(folder / name) if name.endswith(".json") else [folder / name]
            # transformers would read such a file as a pickle, whatever ``use_safetensors`` says.
            if (other := next((file for file in files if file.suffix != ".safetensors"), None)) is not None:
                by = "config.json: transformers_weights" if other.name == named else f"{folder / name}: weight_map"
                raise LoadFailed(f"{by} names {other.name[:200]!r}, which is not a safetensors file")
            return files
    for index in sorted(folder.glob("*.index.json")):  # indexes of pickles
        _shards(index)
    return []


def _shards(index: Path) -> list[Path]:
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise LoadFailed(f"{index}: weight_map must name the file of each weight")
    files = sorted(set(names.values()))
    for name in files:
        if not _stays_inside(name):
            raise LoadFailed(f"{index}: weight_map names {name[:200]!r}, which is not a file of the folder")
        if not (index.parent / name).is_file():
            raise LoadFailed(f"{index}: weight_map names {name[:200]!r}, which does not exist")
    return [index.parent / name for name in files]


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _header(file: Path) -> Tensors:
    if file.suffix != ".safetensors":
        return {}
    if (damage := damage_of(file)) is not None:
        raise LoadFailed(damage)
    return read_header(file)


def _is_needed(name: str, modules: Mapping[str, nn.Module], quantised: bool) -> bool:
    """Returns whether ignoring this tensor would make other weights wrong."""
    path, _, leaf = name.rpartition(".")
    module = modules.get(path)
    scaled = _SCALE.search(leaf) is not None
    if module is None:
        return scaled and not quantised
    # An attention's mask, which old checkpoints hold as ``attn.bias``, belongs to a module without parameters.
    owns = any(True for _ in module.parameters(recurse=False))
    return (scaled and (owns or not quantised)) or (leaf.endswith("bias") and owns)


def _mismatch(name: str, stored: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} has the shape {list(stored)} in the checkpoint, and config.json asks for {list(wanted)}"


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
