"""Attends to pages with FlexAttention: softcap, sinks, windows and chunks, over the pool of pages as one row of keys.

On CPUs torch computes it without the kernel that it compiles for CUDA, so that what the masks and the scores mean is
tested everywhere; the compiled kernel only a GPU can prove.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from mlserver_torch_stream.engine.attention.cuda_gathered import equal_parts
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages

_QUERY_BLOCK = 128
_KEY_BLOCK = 128  # the largest that its kernel takes on every GPU


class FlexAttention:
    """A ``PagedAttention``. ``compiled`` compiles a function, as ``torch.compile`` does; None: as it is."""

    def __init__(self, compiled: Callable[..., Any] | None = None) -> None:
        self._flex: Callable[..., Any] = (
            flex.flex_attention if compiled is None else compiled(flex.flex_attention, dynamic=True)
        )

    def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
        """Returns why it cannot take such a layer; None if it can."""
        if not hasattr(flex, "AuxRequest"):
            return f"the FlexAttention of torch {torch.__version__} does not return the sum of its scores"
        if query.is_cuda and (layer.page_size % _KEY_BLOCK or query.shape[-1] < 16):
            return f"FlexAttention takes pages of a multiple of {_KEY_BLOCK} tokens and heads of 16 values and more"
        return None

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        _clear_tails(batch.tables[layer.group], batch.lengths, layer)
        parts = []
        for rows, tokens, count in equal_parts(batch):
            queries = query[tokens].unflatten(0, (-1, count)).transpose(1, 2)
            positions = batch.positions[tokens].unflatten(0, (-1, count))
            tables, lengths = batch.tables[layer.group][rows], batch.lengths[rows]
            parts.append(self._attend(queries, positions, tables, lengths, layer, options))
        return torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        layer: LayerPages,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """``query`` is ``[rows, heads, count, dim]``. Returns ``[rows * count, heads, dim]``."""
        keys, values = (_one_row(pool) for pool in (layer.keys, layer.values))
        mask = _block_mask(positions, tables, lengths, layer, options)
        cap = options.softcap

        def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            assert cap is not None
            return cap * torch.tanh(score / cap)

        found = self._flex(
            *(query, keys, values),
            score_mod=None if cap is None else capped,
            block_mask=mask,
            scale=options.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
            return_aux=None if options.sinks is None else flex.AuxRequest(lse=True),
        )
        output = found
        if options.sinks is not None:  # a sink takes its share of the probabilities and gives no value
            output, aux = found
            output = output * torch.sigmoid(aux.lse - options.sinks.float()[:, None])[..., None]
        result: torch.Tensor = output.transpose(1, 2).flatten(0, 1).to(query.dtype)
        return result


def _clear_tails(tables: torch.Tensor, lengths: torch.Tensor, layer: LayerPages) -> None:
    """Clears the values after the end of each row in its last page: NaN times a probability of 0 is NaN."""
    assert layer.values is not None
    last = lengths.long() - 1
    pages = tables.gather(1, last[:, None] // layer.page_size)[:, 0].long()
    unused = torch.arange(layer.page_size, device=last.device) > last[:, None] % layer.page_size
    layer.values[pages] = layer.values[pages].masked_fill(unused[:, None, :, None], 0)


def _one_row(pool: torch.Tensor | None) -> torch.Tensor:
    """Returns all pages as one row of keys, ``[1, kv_heads, pages * page_size, dim]``: on CUDA without a copy."""
    assert pool is not None
    return pool.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _block_mask(
    positions: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    layer: LayerPages,
    options: AttentionOptions,
) -> flex.BlockMask:
    """Names the blocks of each row's pages that any of its queries may see, and masks inside them."""
    assert layer.keys is not None
    rows, count = positions.shape
    pages, page_size, device = layer.keys.shape[0], layer.page_size, positions.device
    block = min(_KEY_BLOCK, page_size)
    ratio = page_size // block
    oldest = options.oldest_seen(positions)
    # Where each page of the pool is in a row's sequence; -1: nowhere.
    width = torch.arange(tables.shape[1], device=device)
    held = (width * page_size < lengths[:, None]) & ((width + 1) * page_size > oldest[:, :1])
    place = torch.full((rows, pages + 1), -1, dtype=torch.int32, device=device)
    place.scatter_(1, torch.where(held, tables, pages).long(), width.int().expand(rows, -1))
    # The visible blocks come first, in order; the kernel reads no other blocks.
    blocks = (tables[..., None] * ratio + torch.arange(ratio, device=device)).flatten(1)
    starts = torch.arange(blocks.shape[1], device=device) * block
    seen = (starts < lengths[:, None]) & (starts + block > oldest[:, :1])
    order = torch.argsort((~seen).int(), dim=1, stable=True)
    query_blocks = -(-count // _QUERY_BLOCK)
    indices = torch.zeros((rows, pages * ratio), dtype=torch.int32, device=device)
    indices[:, : blocks.shape[1]] = blocks.gather(1, order)[:, : pages * ratio]
    indices = indices[:, None, None].expand(-1, -1, query_blocks, -1).contiguous()
    number = seen.sum(1, dtype=torch.int32)[:, None, None].expand(-1, -1, query_blocks).contiguous()

    def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        page = place[row, key // page_size]
        position = page * page_size + key % page_size
        return (page >= 0) & (position <= positions[row, query]) & (position >= oldest[row, query])

    return flex.BlockMask.from_kv_blocks(
        number,
        indices,
        BLOCK_SIZE=(_QUERY_BLOCK, block),
        mask_mod=visible,
        seq_lengths=(count, pages * page_size),
        compute_q_blocks=False,
    )
