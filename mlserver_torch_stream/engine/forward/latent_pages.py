"""Expands the pages of models that cache one latent a token, such as DeepSeek's, into keys and values of all heads.

Knows nothing of models but that their attention module has an ``expand_kv``, as transformers names it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mlserver_torch_stream.engine.attention.paged_attention import BatchTensors
from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages


def has_latents(module: nn.Module) -> bool:
    return hasattr(module, "expand_kv") and isinstance(getattr(module, "layer_idx", None), int)


def expanded(module: nn.Module, layer: LayerPages, batch: BatchTensors) -> tuple[LayerPages, BatchTensors]:
    """Returns the batch's pages with keys and values of all heads, and the batch with tables of these pages alone."""
    assert layer.keys is not None and layer.values is not None
    key = ("pages of latents", layer.group)
    if key not in batch.memo:
        batch.memo[key] = _renumbered(batch, layer.group)
    used, own = batch.memo[key]
    keys, values = module.expand_kv(layer.keys[used], layer.values[used])
    return LayerPages(layer.group, len(used), layer.page_size, keys.contiguous(), values.contiguous()), own


def _renumbered(batch: BatchTensors, group: int) -> tuple[torch.Tensor, BatchTensors]:
    """Returns the pages that a batch uses, and the batch with their places among these as its tables."""
    used, places = torch.unique(batch.tables[group], return_inverse=True)
    rows = places.tolist()
    sequences = tuple(
        replace(each, tables=_with(each.tables, group, row[: len(each.tables[group])]))
        for each, row in zip(batch.batch.sequences, rows, strict=True)
    )
    tables = _with(batch.tables, group, places.int())
    return used.long(), replace(batch, batch=Batch(sequences), tables=tables, memo={})


def _with(items: tuple, index: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], item, *items[index + 1 :])
