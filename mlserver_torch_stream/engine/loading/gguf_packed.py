"""Keeps the tensors of a GGUF file as blocks of quantised weights, for kernels that can multiply such blocks.

The folder of a model has the config, the tokenizer, and ``packed.safetensors``. That file has the dense tensors, and
the places of the blocks in the GGUF file by transformers' names.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.mapped_file import map_file
from mlserver_torch_stream.engine.native.packed_rows import (
    BLOCK_FORMATS,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    PackedRows,
    embedding_scale,
)
from mlserver_torch_stream.errors import LoadFailed

if TYPE_CHECKING:  # gguf takes 5 MB
    from mlserver_torch_stream.engine.loading.gguf_model import GgufWeights

WEIGHTS = "packed.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_ROUTER = ".mlp.gate.weight"  # which is never rounded
_EXPERTS = ("all_gates", "all_ups", "all_downs")  # names of the blocks of all experts of a layer, below its experts


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model with packed weights. ``model`` computes slowly, in float32. ``kinds`` counts the tensors of each format.

    ``dequantised`` maps tensors whose format the kernels lack to that format. ``tensors`` are the file's tensors.
    """

    model: Any
    kinds: Mapping[str, int]
    dequantised: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @property
    def description(self) -> str:
        """Describes for the log how the weights are stored."""
        packed = ", ".join(f"{kind} ({count} tensors)" for kind, count in self.kinds.items())
        left = ", ".join(f"{name} ({kind})" for name, kind in self.dequantised.items())
        return f"weights packed as in the file: {packed}" + (f"; dequantised: {left}" if left else "")


def load_packed(folder: Path, gguf_file: Path, config: Any = None) -> PackedModel:
    """Loads a folder that ``write_packed`` has written. ``config``, if given, replaces the folder's config.

    ``gguf_file`` has the same content as the file that was written, and may be in another place.

    Raises NotPacked if our kernels do not support the weights, and LoadFailed if weights are missing.
    """
    config = config or transformers.AutoConfig.from_pretrained(folder)
    model = empty_model(config)
    tensors, metadata = read_tensors(folder, gguf_file)
    blocks, dequantised = json.loads(metadata["blocks"]), json.loads(metadata["dequantised"])
    experts: dict[str, dict[str, PackedRows]] = {}
    for name, tensor in tensors.items():
        kind, *_, heads = blocks.get(name, (None, 0))
        path, _, leaf = name.rpartition(".")
        if leaf in _EXPERTS:
            experts.setdefault(path, {})[leaf] = PackedRows(kind, tensor)
        else:
            _put(model, name, tensor, kind, heads)
    for path, parts in experts.items():
        model.set_submodule(path, PackedExperts(model.get_submodule(path), *(parts[leaf] for leaf in _EXPERTS)))
    if config.tie_word_embeddings:
        _tie(model)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise LoadFailed(f"the file lacks the weights {', '.join(left[:3])}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    kinds = Counter(kind for kind, *_ in blocks.values())
    return PackedModel(model.eval().requires_grad_(False), kinds, dequantised, tensors)


def read_tensors(folder: Path, gguf_file: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Returns the tensors by name, with blocks as bytes of the mapped GGUF file, and the metadata of their places.

    Raises NotPacked if the GGUF file is shorter than when the folder was written.
    """
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    mapped = map_file(gguf_file)
    for name, (_, first, rows, size, _) in json.loads(metadata["blocks"]).items():
        if first + rows * size > len(mapped):
            raise NotPacked(f"{gguf_file} has been cut off: it has {len(mapped):,} bytes, and {name} ends after them")
        tensors[name] = mapped[first : first + rows * size].view(rows, size)
    return tensors, metadata


def empty_model(config: Any) -> Any:
    """Returns a model whose parameters have no memory but whose buffers have values."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _put(model: Any, name: str, tensor: Tensor, kind: str | None, heads: int) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if kind is None:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
        return
    rows = PackedRows(kind, tensor, heads)
    if leaf != "weight" or rows.shape != module.weight.shape:
        raise NotPacked(f"{name} does not fit a weight matrix of the model")
    if isinstance(module, nn.Embedding):
        model.set_submodule(path, PackedEmbedding(rows, embedding_scale(module)))
    elif type(module) is nn.Linear:
        model.set_submodule(path, PackedLinear(rows, module.bias))
    else:
        raise NotPacked(f"{name} belongs to a {type(module).__name__}, which our kernels do not support")


def _tie(model: Any) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        head = PackedLinear(embedding.rows)
        head.weight = embedding.weight
        model.set_output_embeddings(head)
    else:
        model.get_output_embeddings().weight = embedding.weight


def write_packed(gguf_file: Path, folder: Path) -> None:
    """Writes the config, the dense weights and the places of the blocks to a folder for ``load_packed``.

    Raises NotPacked if our kernels do not support the weights, and LoadFailed in the same cases as
    ``read_gguf_model``.
    """
    # Imported here: gguf takes 5 MB, and later loads do not need it.
    from mlserver_torch_stream.engine.loading.gguf_model import loads_by_transformers, read_gguf_model

    if loads_by_transformers(gguf_file):
        raise NotPacked("our kernels do not support the file's architecture")
    model = read_gguf_model(gguf_file)
    tensors: dict[str, _Stored] = {}
    blocks: dict[str, tuple[str, int, int, int, int]] = {}
    dequantised: dict[str, str] = {}
    for name, weights in model.weights.items():
        if len(weights.shape) > 2:
            blocks |= _expert_blocks(name, weights)
            continue
        kind = next(iter(weights.kinds), "F32")
        if kind in BLOCK_FORMATS and weights.blocks and not name.endswith(_ROUTER):
            blocks[name] = (kind, *weights.blocks[0], weights.heads)
            continue
        if kind not in _FLOATS:
            dequantised[name] = kind
        tensors[name] = _Stored(weights.shape, weights.dense)
    if not blocks:
        raise NotPacked("the file has no weights in a block format that our kernels support")
    _write_tensors(folder / WEIGHTS, tensors, {"blocks": json.dumps(blocks), "dequantised": json.dumps(dequantised)})
    model.config.save_pretrained(folder)
    GenerationConfig.from_model_config(model.config).save_pretrained(folder)


def _expert_blocks(name: str, weights: GgufWeights) -> Iterator[tuple[str, tuple[str, int, int, int, int]]]:
    """Yields the blocks of all experts of a layer, with one name for each tensor of the file."""
    path, _, leaf = name.rpartition(".")
    leaves = _EXPERTS[:2] if leaf == "gate_up_proj" else _EXPERTS[2:]
    for part, kind, place in zip(leaves, weights.kinds, weights.blocks, strict=True):
        if kind not in BLOCK_FORMATS:
            raise NotPacked(f"our kernels do not support experts in {kind} ({name})")
        yield f"{path}.{part}", (kind, *place, 0)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A float32 tensor for a safetensors file: its shape, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape)


def _write_tensors(path: Path, tensors: Mapping[str, _Stored], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file with one tensor in memory at a time; safetensors' own function needs all tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for (name, stored), end in zip(tensors.items(), accumulate(each.bytes for each in tensors.values()), strict=True):
        header[name] = {"dtype": "F32", "shape": list(stored.shape), "data_offsets": [end - stored.bytes, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for stored in tensors.values():
            file.write(stored.read().contiguous().numpy().data)
