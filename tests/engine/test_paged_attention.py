"""Attention over pages with torch gives the reference's results, whatever unused slots of pages contain."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    AttentionShape,
    BatchTensors,
    batch_tensors,
)
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence, LayerGroup
from mlserver_torch_stream.engine.checks.attention import farthest
from mlserver_torch_stream.engine.checks.overlap import count_waits
from tests.engine.reference_attention import reference_attention

CPU = torch.device("cpu")
# (tokens in the cache, new tokens): decode of unlike lengths, beginnings and middles of prompts, drafts.
PARTS = [(0, 1), (1, 1), (40, 1), (200, 1), (0, 9), (7, 5), (63, 4), (100, 1), (30, 3)]


def pool(
    batch: Batch,
    page_size: int,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    tokens_first: bool | None = None,
) -> LayerPages:
    """A layer of pages that holds NaN everywhere but at the tokens of the batch's sequences."""
    layer = LayerPages(0, 400 // page_size * 2 + 40, page_size, tokens_first=tokens_first)
    layer.reserve(*(torch.empty(kv_heads, 1, dim, dtype=dtype) for dim in dims))
    assert layer.keys is not None and layer.values is not None
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    for each in batch.sequences:
        places = torch.arange(each.length)
        slots = torch.tensor(each.tables[0])[places // page_size] * page_size + places % page_size
        known = torch.tensor(each.tables[0])[places // page_size] >= 0
        layer.write(*(torch.randn(int(known.sum()), kv_heads, dim).to(dtype) for dim in dims), slots[known])
    return layer


def batch_of(page_size: int, group: LayerGroup) -> Batch:
    pages = iter(random.Random(0).sample(range(400 // page_size * 2 + 40), 400 // page_size * 2 + 40))
    parts = []
    for start, count in PARTS:
        oldest = group.oldest_seen(start) // page_size
        table = [next(pages) if entry >= oldest else -1 for entry in range(-(-(start + count) // page_size))]
        parts.append(BatchSequence([0] * count, start, (table,)))
    return Batch(tuple(parts))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *({}, {"window": 6}, {"chunk": 8}, {"softcap": 5.0}, {"sinks": True}, {"window": 20, "sinks": True}),
        *({"softcap": 3.0, "sinks": True, "window": 6}, {"softcap": 3.0, "chunk": 21}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("page_size", "tokens_first"), [(1, False), (16, False), (16, True), (256, True)])
def test_rows_together_are_as_each_alone(
    page_size: int, tokens_first: bool, kind: dict[str, int], heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    group = LayerGroup((0,), kind.get("window"), kind.get("chunk"))
    batch = batch_of(page_size, group)
    layer = pool(batch, page_size, heads[1], (8, 6), torch.float32, tokens_first)
    sinks = torch.randn(heads[0]) if kind.get("sinks") else None
    options = AttentionOptions(0.3, group.window, group.chunk, kind.get("softcap"), sinks)
    query = torch.randn(batch.tokens, heads[0], 8)
    tensors = batch_tensors(batch, page_size, 1, CPU)
    expected = reference_attention(query, layer, tensors, options)
    assert expected.isfinite().all()
    for _ in range(2):  # as two layers of one forward
        torch.testing.assert_close(GatheredAttention()(query, layer, tensors, options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"window": 6}, {"chunk": 6}, {"softcap": 5.0}, {"sinks": True}], ids=str)
def test_attention_waits_for_no_device(kind: dict[str, int]) -> None:
    batch = batch_of(16, LayerGroup((0,)))
    layer, tensors = pool(batch, 16, 2, (8, 8), torch.float32, True), batch_tensors(batch, 16, 1, CPU)
    sinks = torch.randn(4) if kind.get("sinks") else None
    options = AttentionOptions(0.3, kind.get("window"), kind.get("chunk"), kind.get("softcap"), sinks)
    assert count_waits(lambda: GatheredAttention()(torch.randn(batch.tokens, 4, 8), layer, tensors, options)) == 0


@pytest.mark.parametrize("options", [{}, {"window": 37}, {"softcap": 2.0}, {"chunk": 48}], ids=str)
def test_the_check_finds_a_key_too_many(options: dict[str, Any]) -> None:
    class OneMore(GatheredAttention):
        def __call__(
            self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
        ) -> torch.Tensor:
            longer = (replace(each, start=max(0, each.start - 1)) for each in batch.batch.sequences)
            return super().__call__(query, layer, batch_tensors(Batch(tuple(longer)), 16, 1, CPU), options)

    shape = AttentionShape(4, 2, 8, 8, torch.float32, 0.3, **options)
    assert farthest(OneMore(), shape) > 0.01 and farthest(GatheredAttention(), shape) == 0


@pytest.mark.parametrize("kind", [{}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype(dtype: torch.dtype, kind: dict[str, float]) -> None:
    """Scores with a softcap or sinks are computed in float32. Decode rows are computed together, chunks one by one."""
    torch.manual_seed(0)
    batch = batch_of(16, LayerGroup((0,)))
    layer = pool(batch, 16, 2, (8, 8), dtype)
    query = torch.randn(batch.tokens, 4, 8).to(dtype)
    tensors = batch_tensors(batch, 16, 1, CPU)
    sinks = torch.randn(4).to(dtype) if kind.get("sinks") else None
    options = AttentionOptions(0.3, softcap=kind.get("softcap"), sinks=sinks)
    got = GatheredAttention()(query, layer, tensors, options)
    assert got.dtype == dtype
    expected = reference_attention(query.float(), layer, tensors, options)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


def test_a_batch_as_tensors() -> None:
    parts = (BatchSequence([5, 6, 7], 2, ([3, 1], [5, 4])), BatchSequence([8], 3, ([0], [2])))
    tensors = batch_tensors(Batch(parts), 4, 2, CPU)
    assert tensors.starts.tolist() == [2, 3] and tensors.lengths.tolist() == [5, 4]
    assert tensors.cumulative.tolist() == [0, 3, 4]
    assert tensors.positions.tolist() == [2, 3, 4, 3]
    assert [table.tolist() for table in tensors.tables] == [[[3, 1], [0, 0]], [[5, 4], [2, 0]]]
    assert tensors.slots[0].tolist() == [14, 15, 4, 3]
    with pytest.raises(AssertionError, match="no page"):
        batch_tensors(Batch((BatchSequence([5], 2, ([-1],)),)), 4, 1, CPU)
