"""Sequences over a cache of pages without a scheduler, for tests of forwards: who holds which page, in no order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache


@dataclass
class Held:
    """A sequence's block tables, and how many of its tokens are in the cache."""

    tables: tuple[array[int], ...]
    computed: int = 0


@dataclass
class PageBook:
    """Names its sequences by any string; pages whose window has passed go back, full of NaN."""

    model: PreTrainedModel
    page_size: int = 16
    pages: int = 128
    held: dict[str, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = CacheLayout(self.model.config)
        count = len(layout.spec(self.page_size).groups)
        self.cache = PagedCache(layout, self.page_size, [self.pages] * count, state_slots=0)
        self._free = [random.Random(group).sample(range(self.pages), self.pages) for group in range(count)]

    def batch(self, work: Mapping[str, Sequence[int]], wanted: int | Mapping[str, int] = 1) -> Batch:
        """New tokens of some sequences, which begin or go on; their last ones are ``wanted``."""
        wants = dict.fromkeys(work, wanted) if isinstance(wanted, int) else wanted
        return Batch(tuple(self._part(name, ids, wants.get(name, 1)) for name, ids in work.items()))

    def _part(self, name: str, ids: Sequence[int], wanted: int) -> BatchSequence:
        held = self.held.setdefault(name, Held(tuple(array("i") for _ in self._free)))
        for table, free in zip(held.tables, self._free, strict=True):
            while len(table) * self.page_size < held.computed + len(ids):
                table.append(free.pop())
        return BatchSequence(tuple(ids), held.computed, held.tables, wanted)

    def step(
        self, forward: Forward, work: Mapping[str, Sequence[int]], wanted: int | Mapping[str, int] = 1
    ) -> dict[str, torch.Tensor]:
        """Runs a batch; returns each sequence's logits ``[wanted, vocabulary]``."""
        batch = self.batch(work, wanted)
        rows = forward(batch, self.cache).clone().split([each.wanted for each in batch.sequences])
        for name, ids in work.items():
            self.held[name].computed += len(ids)
            self._pass_windows(self.held[name])
        return dict(zip(work, rows, strict=True))

    def _pass_windows(self, held: Held) -> None:
        for index, (table, group) in enumerate(zip(held.tables, self.cache.groups, strict=True)):
            for entry in range(group.oldest_seen(held.computed) // self.page_size):
                if table[entry] >= 0:
                    self._soil(index, table[entry])
                    self._free[index].insert(0, table[entry])
                    table[entry] = -1

    def _soil(self, group: int, page: int) -> None:
        for layer in self.cache.layers.values():
            if layer.group == group and layer.keys is not None and layer.values is not None:
                layer.keys[page] = layer.values[page] = float("nan")

    def share(self, name: str, other: str, tokens: int) -> None:
        """Begins a sequence with the pages of another's first tokens, whether they are computed yet or not."""
        assert tokens % self.page_size == 0
        pages = tokens // self.page_size
        self.held[name] = Held(tuple(table[:pages] for table in self.held[other].tables), tokens)


def prefilled(
    forward: Forward, model: PreTrainedModel, ids: Sequence[int], chunk: int, page_size: int = 16
) -> tuple[torch.Tensor, PageBook]:
    """The logits of a prompt's last token, and the pages of the prompt, whose name is "row"."""
    book = PageBook(model, page_size, pages=2 + len(ids) // page_size + 64 // page_size)
    for first in range(0, len(ids), chunk):
        last = first + chunk >= len(ids)
        logits = book.step(forward, {"row": ids[first : first + chunk]}, int(last))
    return logits["row"][0].float(), book
