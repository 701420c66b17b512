"""Reads a GGUF file, and returns transformers' config and weights. No weight may be missing or left over.

No weight is read until each tensor has a place in the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import GGUF_ARCHS, get_gguf_config, read_gguf_metadata

from mlserver_torch_stream.engine.loading.gguf_architectures import Architecture, architecture_of
from mlserver_torch_stream.engine.loading.gguf_file import GgufFile, shape_of
from mlserver_torch_stream.engine.native.packed_rows import rotary_halves
from mlserver_torch_stream.errors import LoadFailed


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """One parameter of the model: the joined tensors of the file, or zeros if the file has none for it.

    ``heads`` says in which order the file has the rows, as in ``PackedRows``. ``offset`` is subtracted from the file's
    values.
    """

    parts: tuple[gguf.ReaderTensor, ...]
    shape: tuple[int, ...]
    heads: int = 0
    offset: float = 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(part.tensor_type.name for part in self.parts)

    def dense(self) -> Tensor:
        """Returns the values in float32."""
        if not self.parts:
            return torch.zeros(self.shape, dtype=torch.float32)
        values = [gguf.dequantize(part.data, part.tensor_type) for part in self.parts]
        value = np.concatenate(values, axis=1) if len(values) > 1 else values[0]
        if self.heads:
            value = value[rotary_halves(len(value), self.heads).numpy()]
        value = value - np.float32(self.offset) if self.offset else np.require(value, np.float32, "W")
        return torch.from_numpy(value).reshape(self.shape)

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """The place of each part's blocks in the file: the first byte, the number of rows, and the bytes of a row.

        The rows of a layer's experts follow each other. The list is empty unless the parts are matrices.
        """
        if len(self.shape) < 2 or self.offset:
            return []
        places = ((part.data_offset, math.prod(part.data.shape[:-1]), part.data.shape[-1]) for part in self.parts)
        return [(int(first), int(rows), int(size)) for first, rows, size in places]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in a GGUF file. ``model_class`` is transformers' class. The keys of ``weights`` are parameter names."""

    config: Any
    model_class: type
    weights: Mapping[str, GgufWeights]


def read_gguf_model(path: Path) -> GgufModel:
    """Reads a file.

    Raises LoadFailed if a key or tensor is missing, is unknown or has another shape; the message names it.
    """
    file = GgufFile(path)
    architecture = architecture_of(file)
    config = _config(file, architecture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    tensors: dict[str, list[str]] = {name: [] for name in shapes}
    for tensor, name in architecture.parameters(config.num_hidden_layers).items():
        if name in shapes:
            tensors[name].append(tensor)
    if (unknown := next((name for name, known in tensors.items() if not known), None)) is not None:
        raise LoadFailed(f"files of the architecture {file.architecture} have no tensor for the weights {unknown}")
    weights = {name: _weights(file, architecture, config, shape, tensors[name]) for name, shape in shapes.items()}
    file.check_all_taken()
    return GgufModel(config, type(model), weights)


def read_gguf_config(path: Path) -> Any:
    """Returns transformers' config for a file. Raises LoadFailed if the file is not supported."""
    file = GgufFile(path)
    if file.architecture in GGUF_ARCHS:
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    return _config(file, architecture_of(file))


def loads_by_transformers(path: Path) -> bool:
    """Returns whether transformers' own loader reads the file's architecture and all its tensors.

    Raises LoadFailed if transformers' own loader would ignore a key of the file; the error names the key.
    """
    file = GgufFile(path)
    if file.architecture not in GGUF_ARCHS:
        return False
    metadata, tensors = read_gguf_metadata(str(path))
    config = get_gguf_config(recorded := _RecordedKeys(metadata), tensors)
    every = config.get("full_attention_interval", 1)
    expected = [bool((layer + 1) % every) for layer in range(config["num_hidden_layers"])]
    if (recurrent := file.flags("attention.recurrent_layers")) and recurrent[: len(expected)] != expected:
        raise file.refused("attention.recurrent_layers", f"does not match full_attention_interval, which is {every}")
    keys, values = (file.take(f"attention.{kind}_length", int) for kind in ("key", "value"))
    if values not in (None, keys):
        known = "missing" if keys is None else keys
        raise file.refused(
            "attention.value_length", f"is {values}, but must equal the length of the keys, which is {known}"
        )
    file.mark_taken(recorded.read, tensors)
    file.check_all_taken()
    return True


class _RecordedKeys(dict[str, Any]):
    """A file's metadata, which records the keys that are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _config(file: GgufFile, architecture: Architecture) -> Any:
    return AutoConfig.for_model(**architecture.config(file))


def _weights(
    file: GgufFile, architecture: Architecture, config: Any, shape: tuple[int, ...], tensors: Sequence[str]
) -> GgufWeights:
    """Returns one parameter of this shape from the file's ``tensors``. An absent bias is zero."""
    if all(name.endswith(".bias") and name not in file.tensors for name in tensors):
        return GgufWeights((), shape)
    parts = []
    for name in tensors:
        part = file.tensor(name)
        if part is None:
            raise LoadFailed(f"the file lacks the tensor {name}")
        _check_shape(name, shape_of(part), _part_shape(shape, len(tensors)))
        parts.append(part)
    leaf, heads = tensors[0].split(".")[-2], 0
    if leaf in architecture.permuted:
        heads = config.num_attention_heads if leaf == "attn_q" else config.num_key_value_heads
    return GgufWeights(tuple(parts), shape, heads, architecture.norm_offset if leaf.endswith("norm") else 0.0)


def _part_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    return shape if parts < 2 else (shape[0], shape[1] // parts, *shape[2:])


def _check_shape(tensor: str, has: tuple[int, ...], needs: tuple[int, ...]) -> None:
    if has not in (needs, needs[1:] if needs[0] == 1 else needs):
        raise LoadFailed(f"the tensor {tensor} has the shape {list(has)}, but the model needs {list(needs)}")
