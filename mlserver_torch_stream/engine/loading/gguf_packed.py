"""Loads the tensors of a GGUF file as blocks of quantised weights, for kernels that multiply with such blocks.

Knows nothing of caches or of kernels. A folder holds the config, the tokenizer and ``packed.safetensors``: the blocks
under transformers' names, their rows in transformers' order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from mlserver_torch_stream.engine.native.packed_rows import BLOCK_FORMATS, PackedEmbedding, PackedLinear, PackedRows
from mlserver_torch_stream.errors import LoadFailed

WEIGHTS = "packed.safetensors"
_FLOATS = ("F32", "F16", "BF16")


class NotPacked(Exception):
    """A file's weights cannot be kept packed here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """``model`` computes in float32, slowly. ``kinds``: how many tensors are of each format.

    ``dequantised`` names the tensors whose format the kernels do not have, with that format.
    """

    model: Any
    kinds: Mapping[str, int]
    dequantised: Mapping[str, str]

    @property
    def description(self) -> str:
        packed = ", ".join(f"{kind} ({count} tensors)" for kind, count in self.kinds.items())
        left = ", ".join(f"{name} ({kind})" for name, kind in self.dequantised.items())
        return f"weights packed as in the file: {packed}" + (f"; dequantised: {left}" if left else "")


def write_packed(gguf_file: Path, folder: Path) -> None:
    """Writes the config and the weights to the folder. Raises NotPacked."""
    config = AutoConfig.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    model = _empty(config)
    reader = gguf.GGUFReader(str(gguf_file))
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    try:
        names = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise NotPacked(str(error).splitlines()[0]) from None
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    dequantised: dict[str, str] = {}
    for tensor in reader.tensors:
        name, kind = names.get(tensor.name), tensor.tensor_type.name
        if name is None:
            continue  # such as the frequencies of a rope, which the config has
        rows = _row_order(processor, tensor)
        if kind in BLOCK_FORMATS and rows is not None:
            tensors[name] = torch.from_numpy(tensor.data[rows])
            kinds[name] = kind
            continue
        if kind not in _FLOATS:
            dequantised[name] = kind
        dense = processor.process(weights=gguf.dequantize(tensor.data, tensor.tensor_type), name=tensor.name).weights
        tensors[name] = torch.from_numpy(np.array(dense, dtype=np.float32))
    if not kinds:
        raise NotPacked("the file has no weights in blocks that the kernels know")
    save_file(tensors, folder / WEIGHTS, metadata={"kinds": json.dumps(kinds), "dequantised": json.dumps(dequantised)})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def load_packed(folder: Path) -> PackedModel:
    """Raises NotPacked or LoadFailed."""
    config = AutoConfig.from_pretrained(folder)
    model = _empty(config)
    with safe_open(folder / WEIGHTS, "pt") as file:
        metadata = file.metadata()
        kinds, dequantised = json.loads(metadata["kinds"]), json.loads(metadata["dequantised"])
        for name in file.keys():  # noqa: SIM118  (the file is no mapping)
            _put(model, name, file.get_tensor(name), kinds.get(name))
    if config.tie_word_embeddings:
        _tie(model)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise LoadFailed(f"the file lacks the weights {', '.join(left[:3])}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return PackedModel(model.eval().requires_grad_(False), Counter(kinds.values()), dequantised)


def release_packed(model: nn.Module) -> None:
    """Frees the blocks, of which the kernels have a copy."""
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            del module.rows


def _empty(config: Any) -> Any:
    """Returns a model whose parameters have no memory; its buffers have values."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _row_order(processor: Any, tensor: Any) -> Any:
    """Returns the rows of transformers' weight, as the file numbers them; None if it is no permutation of rows."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if len(shape) != 2:
        return None
    numbers = np.arange(shape[0], dtype=np.float64)[:, None]
    try:
        order = processor.process(weights=numbers, name=tensor.name).weights
    except Exception:  # of a family whose processor needs more than the name
        return None
    found = np.asarray(order).reshape(-1).astype(np.int64)
    return found if np.array_equal(np.sort(found), np.arange(shape[0])) else None


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
