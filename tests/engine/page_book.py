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
from tests.engine.tiny_models import prompt_of, reference


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
        rows = forward(batch, self.cache).tensor.clone().split([each.wanted for each in batch.sequences])
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


def answers(
    model: PreTrainedModel, forward: Forward, requests: Sequence[tuple[int, int]], chunk: int
) -> list[list[int]]:
    """Greedy answers to prompts: ``requests`` are the lengths of each prompt and of its answer.

    Every second step a prompt begins. A step takes chunks of prompts beside the newest tokens of answers.
    """
    book = PageBook(model)
    left = [prompt_of(length, number) for number, (length, _) in enumerate(requests)]
    given: list[list[int]] = [[] for _ in requests]
    for step in range(100):
        begun = [n for n, (_, count) in enumerate(requests) if step >= 2 * n and len(given[n]) < count]
        work = {str(n): left[n][:chunk] or given[n][-1:] for n in begun}
        wanted = {str(n): int(len(left[n]) <= chunk) for n in begun}
        for name, logits in book.step(forward, work, wanted).items() if work else ():
            left[int(name)] = left[int(name)][chunk:]
            given[int(name)] += logits.argmax(-1).tolist()
    return given


def expected_answers(model: PreTrainedModel, requests: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Returns what transformers' ``generate`` gives for the requests of ``answers``, one after the other."""
    return [reference(model, prompt_of(length, n), count) for n, (length, count) in enumerate(requests)]


def errors_of(forwards: Mapping[str, Forward], model: PreTrainedModel, exact: PreTrainedModel) -> dict[str, float]:
    """Returns the sum of each forward's squared errors against ``exact``: at the end of prompts and a token later."""
    errors = dict.fromkeys(forwards, 0.0)
    for length in (2, 17, 40, 90):
        ids = prompt_of(length, length)
        expected, after = exact(torch.tensor([[*ids, 7]])).logits[0, -2:]
        for name, forward in forwards.items():
            logits, book = prefilled(forward, model, ids, chunk=length)
            errors[name] += ((logits - expected).pow(2).mean() / expected.var()).item()
            logits = book.step(forward, {"row": [7]})["row"][0].float()
            errors[name] += ((logits - after).pow(2).mean() / after.var()).item()
    return errors
