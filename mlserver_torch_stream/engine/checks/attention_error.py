"""Measures the error of a paged attention against torch's own attention in float32, on random sequences and layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    AttentionShape,
    PagedAttention,
    batch_tensors,
)
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence

_CPU = torch.device("cpu")
_FAR = 300  # a window or chunk that is shorter than some of the sequences that are compared
_CAP = 3.0  # a softcap that the random scores are near


def narrowed(shape: AttentionShape) -> AttentionShape:
    """Returns the shape with a window, chunk and softcap that take effect in short sequences with random scores."""
    return replace(
        shape,
        window=None if shape.window is None else min(shape.window, _FAR),
        chunk=None if shape.chunk is None else min(shape.chunk, _FAR),
        softcap=None if shape.softcap is None else min(shape.softcap, _CAP),
    )


def farthest(
    attention: PagedAttention, shape: AttentionShape, page_size: int = 16, device: torch.device = _CPU
) -> float:
    """Returns the largest error of one query's and head's output, relative to the size of the exact output.

    The sequences are short and long, with one new token, a few, or a chunk. They run all together, then those with one
    new token, then one alone. Values that no query sees are NaN, so that reading them shows.
    """
    single = [(0, 1), (page_size - 1, 1), (612, 1)]
    batches = ([*single, (page_size, 2), (299, 7), (550, 70)], single, single[-1:])
    return max(_error(attention, shape, page_size, sequences, device) for sequences in batches)


def _error(
    attention: PagedAttention,
    shape: AttentionShape,
    page_size: int,
    sequences: Sequence[tuple[int, int]],
    device: torch.device,
) -> float:
    random = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random).to(device, shape.dtype)

    batch, pages = random_batch(sequences, page_size)
    layer = LayerPages(0, pages, page_size)
    fill_randomly(layer, batch, shape, numbers)
    tensors = batch_tensors(batch, page_size, 1, device)
    sinks = numbers(shape.heads) if shape.has_sinks else None
    options = AttentionOptions(shape.scale, shape.window, shape.chunk, shape.softcap, sinks)
    query = numbers(batch.tokens, shape.heads, shape.key_dim) / (shape.scale * shape.key_dim**0.5)
    ours = attention(query, layer, tensors, options).float()
    assert layer.keys is not None and layer.values is not None
    wide = replace(layer, keys=layer.keys.float(), values=layer.values.float())
    exact = GatheredAttention()(query.float(), wide, tensors, options)
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(error.nan_to_num(torch.inf, torch.inf).max())


def random_batch(parts: Sequence[tuple[int, int]], page_size: int) -> tuple[Batch, int]:
    """Returns sequences with these starts and numbers of new tokens, on shuffled pages, and the number of pages."""
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
    size = layer.page_size
    for each in batch.sequences:
        slots = [each.tables[0][position // size] * size + position % size for position in range(each.length)]
        keys, values = (numbers(each.length, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        layer.write(keys, values, torch.tensor(slots, device=keys.device))
