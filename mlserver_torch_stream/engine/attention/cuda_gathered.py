"""Attends to pages in plain torch: gathers the keys and values of all decode rows at once, or of one prompt's chunk.

It takes every option, page size and dtype, and a device can record it: no number of a batch is read from the device. It
costs a copy of the keys and values.
"""

from __future__ import annotations

import torch

from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors
from mlserver_torch_stream.engine.attention.torch_attention import weigh
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages


def gathered_attention(
    query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
) -> torch.Tensor:
    """A ``PagedAttention``."""
    output: torch.Tensor | None = None
    for rows, tokens, count in equal_parts(batch):
        queries = query[tokens].unflatten(0, (-1, count))
        positions = batch.positions[tokens].unflatten(0, (-1, count))
        result = _attend(queries, positions, batch.tables[layer.group][rows], layer, options).flatten(0, 1)
        if len(result) == len(query):
            return result
        output = query.new_empty((len(query), *result.shape[1:])) if output is None else output
        output[tokens] = result
    assert output is not None
    return output


def equal_parts(batch: BatchTensors) -> list[tuple[slice, slice, int]]:
    """Cuts a batch into neighbours with one new token each, and single sequences with more.

    Yields the sequences, the tokens and the number of each one's tokens.
    """
    parts: list[tuple[slice, slice, int]] = []
    token = 0
    for row, each in enumerate(batch.batch.sequences):
        stop = token + each.count
        if parts and each.count == 1 and parts[-1][2] == 1:
            parts[-1] = slice(parts[-1][0].start, row + 1), slice(parts[-1][1].start, stop), 1
        else:
            parts.append((slice(row, row + 1), slice(token, stop), each.count))
        token = stop
    return parts


def _attend(
    query: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    layer: LayerPages,
    options: AttentionOptions,
) -> torch.Tensor:
    """``query`` is ``[rows, count, heads, dim]``, ``positions`` ``[rows, count]``, ``tables`` ``[rows, width]``."""
    count, heads = query.shape[1:3]
    oldest = options.oldest_seen(positions)
    first, tables = _seen_pages(oldest[:, 0], tables, count, layer.page_size, options)
    key_positions = first[:, None] + torch.arange(tables.shape[1] * layer.page_size, device=query.device)
    seen = (key_positions[:, None] <= positions[..., None]) & (key_positions[:, None] >= oldest[..., None])
    # A page may hold NaN after a sequence's end, and NaN times a probability of 0 is NaN.
    unseen = ~seen.any(1)[:, None, :, None]
    keys, values = (_gather(pool, tables).masked_fill_(unseen, 0) for pool in (layer.keys, layer.values))
    groups = heads // keys.shape[1]
    # The query heads of a key head become more queries of it: keys and values are not repeated.
    folded = query.transpose(1, 2).unflatten(1, (-1, groups)).flatten(2, 3)  # [rows, kv_heads, groups * count, dim]
    mask = seen[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # [rows, 1, groups * count, keys]
    sinks = None if options.sinks is None else options.sinks.repeat_interleave(count).reshape(1, keys.shape[1], -1, 1)
    result = weigh(folded, keys, values, mask, options, sinks)
    return result.unflatten(2, (groups, count)).flatten(1, 2).transpose(1, 2)


def _seen_pages(
    oldest: torch.Tensor, tables: torch.Tensor, count: int, page_size: int, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the position of the first gathered key of each row, and the pages to gather.

    The number of pages depends on shapes and options alone.
    """
    span = options.window if options.window is not None else options.chunk
    width = tables.shape[1] if span is None else min(tables.shape[1], (span + count - 2) // page_size + 2)
    if width == tables.shape[1]:
        return torch.zeros_like(oldest), tables
    first = (oldest // page_size).clamp(max=tables.shape[1] - width)
    return first * page_size, tables.gather(1, first[:, None] + torch.arange(width, device=tables.device))


def _gather(pool: torch.Tensor | None, tables: torch.Tensor) -> torch.Tensor:
    """Returns ``[rows, kv_heads, keys, dim]``."""
    assert pool is not None
    return pool[tables].transpose(1, 2).reshape(len(tables), pool.shape[1], -1, pool.shape[3])
