"""Computes paged attention with torch's varlen attention (FlashAttention 2), in one call for all sequences of a step.

The kernel is tested only on GPUs; the arguments of the call are tested on every machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, PagedAttention
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages

_MAX_DIM = 256
_NEEDED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits")


def find_varlen() -> Callable[..., Any] | None:
    """Returns torch's function; None if torch is older than 2.13, where the function does not accept block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return None
    names = inspect.signature(varlen_attn_out).parameters
    return varlen_attn_out if all(name in names for name in _NEEDED) else None


class VarlenAttention(PagedAttention):
    """Paged attention by torch's varlen attention.

    ``function`` has the signature of ``torch.nn.attention.varlen.varlen_attn_out``; None if torch lacks it.

    Layers that this attention refuses are computed with torch's operators.
    """

    name = "varlen"
    page_multiple = 256  # FlashAttention 2 reads only such pages

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self._gathered = GatheredAttention()
        self._refusals: dict[str, None] = {}

    def describe(self) -> str:
        others = f" (torch's in some layers: {'; '.join(self._refusals)})" if self._refusals else ""
        return f"varlen attention{others}"

    def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
        assert layer.keys is not None and layer.values is not None
        if self._function is None:
            return f"torch {torch.__version__} has no varlen attention with block tables"
        if options.softcap is not None or options.sinks is not None or options.chunk is not None:
            return "varlen attention does not support softcaps, sinks or chunks"
        if layer.page_size % self.page_multiple:
            return f"varlen attention needs pages of a multiple of {self.page_multiple} tokens, not {layer.page_size}"
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"varlen attention does not support {query.dtype}"
        if query.shape[-1] != layer.values.shape[-1] or query.shape[-1] > _MAX_DIM or query.shape[-1] % 8:
            return "varlen attention needs keys and values of the same size, a multiple of 8 up to 256"
        return None

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        if (reason := self.refusal(query, layer, options)) is not None:
            self._refusals[reason] = None
            return self._gathered(query, layer, batch, options)
        assert self._function is not None and layer.keys is not None and layer.values is not None
        keys, values = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)  # [pages, page, kv_heads, dim]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._function(
            *(output, query, keys, values, batch.cumulative, _key_ends(batch)),
            max(each.count for each in batch.batch.sequences),
            max(each.length for each in batch.batch.sequences),
            scale=options.scale,
            # (-1, 0) is causal. torch's window does not count the query's own key.
            window_size=(-1 if options.window is None else options.window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=batch.lengths,
            block_table=batch.tables[layer.group],
            num_splits=1,  # more splits leave rows unwritten: https://github.com/pytorch/pytorch/issues/194167
        )
        return output


def _key_ends(batch: BatchTensors) -> torch.Tensor:
    """Returns where each sequence's keys would end if the keys were packed; FlashAttention 2 requires this, too."""
    key = "ends of keys"
    if key not in batch.memo:
        batch.memo[key] = torch.nn.functional.pad(batch.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    ends: torch.Tensor = batch.memo[key]
    return ends
