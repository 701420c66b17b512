"""Computes paged attention in plain torch, one sequence after the other, and how far another attention is from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    batch_tensors,
)
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages


def reference_attention(
    query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
) -> torch.Tensor:
    """A ``PagedAttention``; scores and sums are in float32."""
    parts = query.split([sequence.count for sequence in batch.batch.sequences])
    pairs = zip(parts, batch.batch.sequences, strict=True)
    return torch.cat([_attend(part, layer, sequence, options) for part, sequence in pairs])


def _attend(query: torch.Tensor, layer: LayerPages, sequence: BatchSequence, options: AttentionOptions) -> torch.Tensor:
    seen = torch.arange(sequence.start, sequence.length, device=query.device)[:, None]
    oldest = options.oldest_seen(seen)
    first = int(oldest[0])
    keys, values = (part.float() for part in layer.read(sequence.tables[layer.group], first, sequence.length))
    heads, kv_heads = query.shape[1], keys.shape[0]
    keys, values = (part.repeat_interleave(heads // kv_heads, 0) for part in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", query.float(), keys) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(first, sequence.length, device=query.device)
    scores = scores.masked_fill((position > seen) | (position < oldest), float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().reshape(heads, 1, 1).expand(heads, len(query), 1)
        probabilities = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, -1)
    return torch.einsum("hqk,hkd->qhd", probabilities, values).to(query.dtype)


# Tokens in the cache and new ones of the sequences that are compared: short and long, one new token, some, a chunk.
_SEQUENCES = ((0, 1), (15, 1), (16, 2), (612, 1), (299, 7), (550, 70))
_FAR = 300  # a window or chunk that is shorter than some of those sequences
_CAP = 3.0  # a softcap that the random scores are near


class AttentionShape(NamedTuple):
    """What an attention of a model is called with."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @classmethod
    def of(cls, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> AttentionShape:
        assert layer.keys is not None and layer.values is not None
        dims = (query.shape[1], layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        sight = (options.window, options.chunk, options.softcap)
        return cls(*dims, query.dtype, options.scale, *sight, options.sinks is not None)

    @property
    def narrowed(self) -> AttentionShape:
        """The shape with a window, chunk and softcap that take effect in short sequences with random scores."""
        return self._replace(
            window=None if self.window is None else min(self.window, _FAR),
            chunk=None if self.chunk is None else min(self.chunk, _FAR),
            softcap=None if self.softcap is None else min(self.softcap, _CAP),
        )


def farthest(
    attention: PagedAttention,
    shape: AttentionShape,
    page_size: int = 16,
    sequences: Sequence[tuple[int, int]] = _SEQUENCES,
    device: torch.device | None = None,
    tokens_first: bool | None = None,
) -> float:
    """Returns how far an attention is from the exact results on random values, of a query's and head's output at most.

    The difference is a part of that output's size. What no query sees is NaN, so that a read of it shows.
    ``tokens_first`` is that of ``LayerPages``.
    """
    device, random = device or torch.device("cpu"), torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random).to(device, shape.dtype)

    batch, pages = random_batch(sequences, page_size)
    layer = LayerPages(0, pages, page_size, tokens_first=tokens_first)
    fill_randomly(layer, batch, shape, numbers)
    tensors = batch_tensors(batch, page_size, 1, device)
    sinks = numbers(shape.heads) if shape.has_sinks else None
    options = AttentionOptions(shape.scale, shape.window, shape.chunk, shape.softcap, sinks)
    query = numbers(batch.tokens, shape.heads, shape.key_dim) / (shape.scale * shape.key_dim**0.5)
    ours = attention(query, layer, tensors, options).float()
    assert layer.keys is not None and layer.values is not None
    wide = replace(layer, keys=layer.keys.float(), values=layer.values.float())
    exact = reference_attention(query.float(), wide, tensors, options)
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(error.nan_to_num(torch.inf, torch.inf).max())


def random_batch(parts: Sequence[tuple[int, int]], page_size: int) -> tuple[Batch, int]:
    """Returns sequences with these starts and new tokens, on pages in no order, and the number of the pages."""
    counts = [-(-(start + count) // page_size) for start, count in parts]
    order = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist())
    tables = [tuple(next(order) for _ in range(count)) for count in counts]
    sequences = (
        BatchSequence((0,) * count, start, (table,)) for (start, count), table in zip(parts, tables, strict=True)
    )
    return Batch(tuple(sequences)), sum(counts)


def fill_randomly(layer: LayerPages, batch: Batch, shape: AttentionShape, numbers: Callable[..., torch.Tensor]) -> None:
    """Writes random keys and values of all tokens of the sequences, and NaN elsewhere."""
    layer.reserve(numbers(shape.kv_heads, 1, shape.key_dim), numbers(shape.kv_heads, 1, shape.value_dim))
    for pool in (layer.keys, layer.values):
        assert pool is not None
        pool.fill_(torch.nan)
        pool[layer.spare] = 0
    size = layer.page_size
    for each in batch.sequences:
        slots = [each.tables[0][position // size] * size + position % size for position in range(each.length)]
        keys, values = (numbers(each.length, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        layer.write(keys, values, torch.tensor(slots, device=keys.device))
