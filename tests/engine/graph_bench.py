"""Captured steps over a small cache, sequences on pages of their own, and greedy answers through any forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.cuda_gathered import gathered_attention
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.cuda_graphs.verify_graphs import verified
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.pipeline.stages import Pipeline
from tests.engine.tape import TapeRecorder

PAGE_SIZE = 4
PAGES = 64
WIDTHS = [4, 20]


def cache_of(model: PreTrainedModel, page_size: int = PAGE_SIZE, pages: int = PAGES) -> PagedCache:
    layout = CacheLayout(model.config)
    return PagedCache(layout, page_size, [pages] * len(layout.spec(page_size).groups), 4)


def captured(
    model: PreTrainedModel,
    recorder: TapeRecorder,
    sequences: int = 4,
    pipeline: Pipeline | None = None,
    way: Way = Way.PACKED,
    widths: Sequence[int] = WIDTHS,
) -> GraphForward | None:
    forward = ModelForward(model, way, gathered_attention)
    return verified(forward, cache_of(model), recorder, sequences, list(widths), pipeline)


@dataclass
class Answered:
    tokens: list[int]
    count: int
    tables: tuple[tuple[int, ...], ...]
    computed: int = 0
    answer: list[int] = field(default_factory=list)


class Answers:
    """Greedy answers of requests, each of which joins two steps after the one before it."""

    def __init__(self, cache: PagedCache, requests: Sequence[tuple[Sequence[int], int]]) -> None:
        self._cache = cache
        # Neighbours in a sequence are no neighbours in the pool.
        free = [iter(sorted(range(PAGES), key=lambda page: page * 37 % PAGES)) for _ in cache.groups]
        self.sequences = []
        for prompt, count in requests:
            pages = -(-(len(prompt) + count) // cache.page_size)
            tables = tuple(tuple(next(each) for _ in range(pages)) for each in free)
            self.sequences.append(Answered(list(prompt), count, tables))

    def run(self, forward: Forward) -> list[list[int]]:
        waiting, running = list(self.sequences), []
        for step in range(1000):
            if waiting and step % 2 == 0:
                running.append(waiting.pop(0))
            if not running:
                break
            logits = forward(Batch(tuple(self._part(each) for each in running)), self._cache).tensor
            for each, row in zip(running, logits, strict=True):
                each.computed = len(each.tokens)
                each.tokens.append(int(row.argmax()))
                each.answer.append(each.tokens[-1])
            running = [each for each in running if len(each.answer) < each.count]
        return [each.answer for each in self.sequences]

    def _part(self, each: Answered) -> BatchSequence:
        tables = []
        for group, table in zip(self._cache.groups, each.tables, strict=True):
            passed = group.oldest_seen(each.computed) // self._cache.page_size
            needed = -(-len(each.tokens) // self._cache.page_size)
            tables.append(tuple(-1 if index < passed else table[index] for index in range(needed)))
        return BatchSequence(tuple(each.tokens[each.computed :]), each.computed, tuple(tables))


def decode_batch(cache: PagedCache, starts: Sequence[int], seed: int = 0) -> Batch:
    """A step of sequences with so many tokens in the cache, on pages of their own in an order of no use."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(PAGES, generator=generator).tolist()
    sequences = []
    for start in starts:
        count = start // cache.page_size + 1
        table, order = tuple(order[:count]), order[count:]
        token = int(torch.randint(0, 250, (), generator=generator))
        sequences.append(BatchSequence((token,), start, (table,) * len(cache.groups)))
    return Batch(tuple(sequences))


def filled(cache: PagedCache) -> list[torch.Tensor]:
    """Fills all pages with random numbers, and returns copies of them."""
    torch.manual_seed(0)
    pools = [pool for layer in cache.layers.values() for pool in (layer.keys, layer.values) if pool is not None]
    return [pool.normal_().clone() for pool in pools]
