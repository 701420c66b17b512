"""Loads the tensors of a GGUF file as blocks of quantised weights, for kernels that multiply with such blocks.

A folder holds the config, the tokenizer and ``packed.safetensors``: the blocks under transformers' names, their rows in
transformers' order (``gguf_blocks``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mlserver_torch_stream.engine.native.packed_rows import PackedEmbedding, PackedLinear, PackedRows
from mlserver_torch_stream.errors import LoadFailed

WEIGHTS = "packed.safetensors"


class NotPacked(Exception):
    """A file's weights cannot be kept packed here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """``model`` computes in float32, slowly. ``kinds``: how many tensors are of each format.

    ``dequantised`` names the tensors whose format the kernels do not have, with that format. ``tensors``: the file's.
    """

    model: Any
    kinds: Mapping[str, int]
    dequantised: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @property
    def description(self) -> str:
        packed = ", ".join(f"{kind} ({count} tensors)" for kind, count in self.kinds.items())
        left = ", ".join(f"{name} ({kind})" for name, kind in self.dequantised.items())
        return f"weights packed as in the file: {packed}" + (f"; dequantised: {left}" if left else "")


def load_packed(folder: Path) -> PackedModel:
    """Raises NotPacked or LoadFailed."""
    config = AutoConfig.from_pretrained(folder)
    model = empty_model(config)
    tensors, metadata = read_tensors(folder)
    kinds, dequantised = json.loads(metadata["kinds"]), json.loads(metadata["dequantised"])
    for name, tensor in tensors.items():
        _put(model, name, tensor, kinds.get(name))
    if config.tie_word_embeddings:
        _tie(model)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise LoadFailed(f"the file lacks the weights {', '.join(left[:3])}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return PackedModel(model.eval().requires_grad_(False), Counter(kinds.values()), dequantised, tensors)


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Returns the tensors of the file by name, blocks as bytes, and its metadata."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def empty_model(config: Any) -> Any:
    """Returns a model whose parameters have no memory; its buffers have values."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _put(model: Any, name: str, tensor: Tensor, kind: str | None) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if kind is None:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
        return
    rows = PackedRows(kind, tensor)
    if leaf != "weight" or rows.shape != module.weight.shape:
        raise NotPacked(f"{name} is no projection of the model")
    if type(module) is nn.Embedding:
        model.set_submodule(path, PackedEmbedding(rows))
    elif type(module) is nn.Linear:
        model.set_submodule(path, PackedLinear(rows, module.bias))
    else:
        raise NotPacked(f"{name} belongs to a {type(module).__name__}")


def _tie(model: Any) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        head = PackedLinear(embedding.rows)
        head.weight = embedding.weight
        model.set_output_embeddings(head)
    else:
        model.get_output_embeddings().weight = embedding.weight
