"""Decides which share of the GPUs' free memory weights may take, by their bytes, before any is read.

Knows nothing of device maps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.loading.config_fields import read_config
from mlserver_torch_stream.engine.loading.safetensors_header import FLOATS, StoredTensor, read_header

logger = logging.getLogger(__name__)

# Of the free memory of a GPU; the rest is for the KV cache and activations. A larger share is better than weights on
# the CPU, which every step moves to the GPU.
GPU_WEIGHT_SHARES = (0.7, 0.9)
_LEAST = GPU_WEIGHT_SHARES[0]
# The part of a GPU that stays empty, since a layer is on one GPU as a whole.
_LOST_PER_GPU = 0.03


def weight_share(weights: int | None, free: Sequence[int]) -> float:
    """Returns the smallest share of these GPUs' ``free`` bytes that holds ``weights``, else the largest one.

    The weights that it does not hold go to the CPU. None: their bytes are not known, and the smallest share is taken.
    """
    if weights is None:
        logger.info("weights may take %.0f %% of the GPUs: their size is not known before they are read", 100 * _LEAST)
        return _LEAST
    whole = 1.0 - (_LOST_PER_GPU if len(free) > 1 else 0.0)
    fitting = (share for share in GPU_WEIGHT_SHARES if weights <= sum(free) * share * whole)
    share = next(fitting, None)
    rest = "" if share is not None else "; the CPU holds the rest, which every step moves"
    share = share or GPU_WEIGHT_SHARES[-1]
    logger.info(
        "weights of %s may take %.0f %% of the %s that are free on %d GPUs%s",
        *(format_bytes(weights), 100 * share, format_bytes(sum(free)), len(free), rest),
    )
    return share


def weight_bytes(place: str, gguf_file: Path | None, dtype: str, **options: Any) -> int | None:
    """Returns the bytes of a model's weights in memory; None if its files do not tell.

    A folder's safetensors say this of quantised weights too. Without them, the config says how many weights there are.
    ``options`` are those of ``from_pretrained`` for reading the config.
    """
    try:
        asked = None if dtype == "auto" else getattr(torch, dtype)
        if gguf_file is None and (files := sorted(Path(place).glob("*.safetensors"))):
            return sum(_stored_bytes(file, asked) for file in files)
        config = read_config(place, place, gguf_file, **options)
        if getattr(config, "quantization_config", None):
            return None
        kind = asked or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=kind, trust_remote_code=options.get("trust_remote_code", False)
            )
        return int(sum(each.numel() * each.element_size() for each in model.parameters()))
    except Exception as error:  # a config or a model's code can raise any error, which the load will report
        logger.info("the size of the weights is not known: %s", " ".join(str(error).split())[:200])
        return None


def _stored_bytes(file: Path, asked: torch.dtype | None) -> int:
    """Returns the bytes of a safetensors file's tensors, in the dtype that is asked for."""
    return sum(_bytes_of(tensor, asked) for tensor in read_header(file).values())


def _bytes_of(tensor: StoredTensor, asked: torch.dtype | None) -> int:
    bits = asked.itemsize * 8 if asked is not None and tensor.dtype in FLOATS else FLOATS.get(tensor.dtype)
    return tensor.bits // 8 if bits is None else tensor.elements * bits // 8
