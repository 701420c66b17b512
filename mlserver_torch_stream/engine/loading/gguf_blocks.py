"""Writes the tensors of a GGUF file, as the blocks that they are, to the folder that ``gguf_packed`` loads.

Knows nothing of kernels. Imported when a file is converted: the package gguf takes 5 MB, and later loads do without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from mlserver_torch_stream.engine.loading.gguf_packed import WEIGHTS, NotPacked, empty_model
from mlserver_torch_stream.engine.native.packed_rows import BLOCK_FORMATS

_FLOATS = ("F32", "F16", "BF16")


def write_packed(gguf_file: Path, folder: Path) -> None:
    """Writes the config and the weights to the folder. Raises NotPacked."""
    config = AutoConfig.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    model = empty_model(config)
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
