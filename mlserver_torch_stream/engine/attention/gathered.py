"""Computes paged attention with torch's operators, which read copies of the keys and values that a sequence sees.

This attention supports every device, option, page size and dtype, and never waits for a device. Sequences with one new
token are computed together; chunks of prompts are computed one after the other.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, PagedAttention
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.devices import from_host

_SHORT = 6  # sequences of up to 2 ** 6 keys are computed together whatever their lengths
_QUERIES = 256  # the number of a chunk's queries whose scores are in float32 at the same time

Rows = list[tuple[torch.Tensor, torch.Tensor, int]]
"""Sequences that see similar numbers of keys, their positions among the tokens, and the largest number of keys."""
Chunks = list[tuple[int, int, int]]
"""The index of a sequence, and where its tokens begin and end."""


class GatheredAttention(PagedAttention):
    """Attention with torch's operators. With a softcap or sinks, scores are computed in float32.

    ``reason`` says why no faster attention is used.
    """

    name = "torch"

    def __init__(self, reason: str = "") -> None:
        self._reason = reason

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        assert layer.values is not None
        rows, chunks = _parts(batch, options)
        output = query.new_empty((*query.shape[:2], layer.values.shape[-1]))
        query = query if _is_plain(options) else query.float()
        for sequences, places, width in rows:
            output[places] = _attend_rows(query[places], layer, batch, options, sequences, width).to(output.dtype)
        for sequence, first, stop in chunks:
            output[first:stop] = _attend_chunk(query[first:stop], layer, batch, options, sequence)
        return output

    def describe(self) -> str:
        return f"torch's attention ({self._reason})" if self._reason else "torch's attention"


def _parts(batch: BatchTensors, options: AttentionOptions) -> tuple[Rows, Chunks]:
    """Returns the sequences with one new token, grouped by the number of keys they see, and the other sequences.

    A gather is as wide as its longest row. If all lengths lie between two consecutive powers of two, less than half of
    a gather is padding.
    """
    key = ("parts", options.window, options.chunk)
    if key not in batch.memo:
        similar: dict[int, list[tuple[int, int, int]]] = {}
        chunks: Chunks = []
        for index, (each, end) in enumerate(zip(batch.batch.sequences, batch.batch.ends, strict=True)):
            if each.count == 1:
                seen = each.length - options.first_seen(each.start)
                similar.setdefault(max(_SHORT, (seen - 1).bit_length()), []).append((index, end - 1, seen))
            else:
                chunks.append((index, end - each.count, end))
        rows = []
        for group in similar.values():
            numbers = from_host(group, batch.starts.device)
            rows.append((numbers[:, 0], numbers[:, 1], max(seen for _, _, seen in group)))
        batch.memo[key] = rows, chunks
    parts: tuple[Rows, Chunks] = batch.memo[key]
    return parts


def _attend_rows(
    query: torch.Tensor,
    layer: LayerPages,
    batch: BatchTensors,
    options: AttentionOptions,
    sequences: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Returns the attention of sequences with one new token, ``[rows, heads, value_dim]``."""
    key = ("keys of rows", layer.group, options.window, options.chunk, id(sequences))
    if key not in batch.memo:
        last = batch.lengths[sequences].long() - 1
        places = options.oldest_seen(last)[:, None] + torch.arange(width, device=last.device)
        valid = places <= last[:, None]
        # Shorter rows read their newest key again, because the rest of its page may hold NaN.
        places = torch.minimum(places, last[:, None])
        batch.memo[key] = _slots(batch.tables[layer.group][sequences], batch, places), valid[:, None, None]
    slots, valid = batch.memo[key]
    keys, values = (part.to(query.dtype) for part in layer.gather(slots))
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [rows, kv_heads, heads of each, head_dim]
    sinks = None if options.sinks is None else options.sinks.reshape(1, keys.shape[1], -1, 1)
    return _weigh(grouped, keys, values, valid, options, sinks).flatten(1, 2)


def _attend_chunk(
    query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions, sequence: int
) -> torch.Tensor:
    """Returns the attention of one sequence's new tokens, ``[tokens, heads, value_dim]``."""
    key = ("keys of a chunk", layer.group, options.window, options.chunk, sequence)
    if key not in batch.memo:
        each = batch.batch.sequences[sequence]
        seen = torch.arange(each.start, each.length, device=query.device)[:, None]
        places = torch.arange(options.first_seen(each.start), each.length, device=query.device)
        slots = _slots(batch.tables[layer.group][sequence : sequence + 1], batch, places[None])
        batch.memo[key] = slots, (places <= seen) & (places >= options.oldest_seen(seen))
    slots, valid = batch.memo[key]
    keys, values = (part.to(query.dtype).squeeze(0).unsqueeze(1) for part in layer.gather(slots))
    grouped = query.transpose(0, 1).unflatten(0, (keys.shape[0], -1))  # [kv_heads, heads of each, tokens, head_dim]
    keys, values = (part.expand(-1, grouped.shape[1], -1, -1) for part in (keys, values))
    if _is_plain(options):
        return _weigh(grouped, keys, values, valid, options, None).flatten(0, 1).transpose(0, 1)
    sinks = None if options.sinks is None else options.sinks.reshape(*grouped.shape[:2], 1, 1)
    pairs = zip(grouped.split(_QUERIES, 2), valid.split(_QUERIES), strict=True)
    parts = [_weigh(part, keys, values, shown, options, sinks) for part, shown in pairs]
    return torch.cat(parts, 2).flatten(0, 1).transpose(0, 1)


def _slots(table: torch.Tensor, batch: BatchTensors, places: torch.Tensor) -> torch.Tensor:
    """Returns the slots of the positions ``places`` ``[rows, n]`` of sequences; ``table`` has their block tables."""
    return table.gather(1, places // batch.page_size).long() * batch.page_size + places % batch.page_size


def _is_plain(options: AttentionOptions) -> bool:
    return options.softcap is None and options.sinks is None


def _weigh(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Lets queries ``[a, b, queries, dim]`` attend to keys ``[a, b, keys, dim]`` where the mask ``valid`` is true.

    ``sinks`` are the sinks of the options, with the shape ``[..., queries or 1, 1]``. Matrix products are computed in
    the dtype of the arguments.
    """
    if _is_plain(options):
        output: torch.Tensor = scaled_dot_product_attention(query, keys, values, attn_mask=valid, scale=options.scale)
        return output
    scores = (query @ keys.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~valid, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    probabilities = torch.softmax(scores, -1)[..., : keys.shape[-2]]
    return probabilities.to(values.dtype) @ values
