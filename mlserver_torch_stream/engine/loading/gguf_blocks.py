"""Writes the tensors of a GGUF file, as the blocks that they are, to the folder that ``gguf_packed`` loads.

Imported when a file is converted: the package gguf takes 5 MB, and later loads do without.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from mlserver_torch_stream.engine.loading.gguf_model import loads_by_transformers, read_gguf_model
from mlserver_torch_stream.engine.loading.gguf_packed import WEIGHTS, NotPacked
from mlserver_torch_stream.engine.native.packed_rows import BLOCK_FORMATS

_FLOATS = ("F32", "F16", "BF16")


def write_packed(gguf_file: Path, folder: Path) -> None:
    """Writes the config and the weights to the folder. Raises NotPacked, or LoadFailed as ``read_gguf_model`` does."""
    if loads_by_transformers(gguf_file):
        raise NotPacked("our kernels do not have the file's architecture")
    model = read_gguf_model(gguf_file)
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    dequantised: dict[str, str] = {}
    for name, weights in model.weights.items():
        if len(weights.parts) > 1:
            raise NotPacked(f"our kernels do not have the experts {name}")
        kind = next(iter(weights.kinds), "F32")
        if kind in BLOCK_FORMATS and (blocks := weights.blocks()) is not None:
            tensors[name], kinds[name] = blocks, kind
            continue
        if kind not in _FLOATS:
            dequantised[name] = kind
        tensors[name] = weights.dense()
    if not kinds:
        raise NotPacked("the file has no weights in blocks that the kernels know")
    save_file(tensors, folder / WEIGHTS, metadata={"kinds": json.dumps(kinds), "dequantised": json.dumps(dequantised)})
    model.config.save_pretrained(folder)
    GenerationConfig.from_model_config(model.config).save_pretrained(folder)
