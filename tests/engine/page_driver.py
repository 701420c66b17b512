"""Drives a forward over pages without a scheduler: sequences join, leave, fork, share pages and are computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.paged_attention import PagedAttention
from mlserver_torch_stream.engine.attention.torch_attention import torch_attention
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache


@dataclass
class Driven:
    """A sequence: its prompt and greedy answer, how many tokens are in the cache, and where."""

    prompt: list[int]
    slot: int
    tables: tuple[list[int], ...]
    answer: list[int] = field(default_factory=list)
    computed: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # those of the token at each position
    keeps: bool = False  # pages that a window has passed, so that others can share them

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


class PageDriver:
    """Owns the pages of a small cache. What nobody owns is NaN, so that whoever reads it is found out."""

    def __init__(
        self,
        model: PreTrainedModel,
        way: Way,
        page_size: int,
        attention: PagedAttention = torch_attention,
        *,
        chunked: bool = True,
    ) -> None:
        layout = CacheLayout(model.config)
        self.groups = layout.spec(page_size).groups
        self.page_size = page_size
        count = 64 + 1600 // page_size
        self.cache = PagedCache(layout, page_size, [count] * len(self.groups), state_slots=64)
        self.forward = ModelForward(model, way, attention)
        self.has_states = layout.has_states
        self._chunked = chunked
        # In an order of no use: neighbours in a sequence are no neighbours in the pool.
        self._free = [sorted(range(count), key=lambda page: page * 37 % 101) for _ in self.groups]
        self._owners = [[0] * count for _ in self.groups]
        self._slots = list(range(64))
        self._copies: list[tuple[int, int, int]] = []
        self._state_copies: list[tuple[int, int]] = []

    def join(self, prompt: Sequence[int], keeps: bool = False) -> Driven:
        return Driven(list(prompt), self._slots.pop(), tuple([] for _ in self.groups), keeps=keeps)

    def join_beside(self, other: Driven, prompt: Sequence[int], shared: int) -> Driven:
        """A sequence whose first ``shared`` tokens, whole pages of them, are those of the other."""
        assert other.tokens[:shared] == list(prompt)[:shared]
        joined = self.join(prompt)
        self._share(joined, other, shared)
        return joined

    def fork(self, other: Driven) -> Driven:
        """A second answer to the same prompt: full pages are shared, the last one and the states are copied."""
        forked = self.join(other.prompt)
        self._share(forked, other, other.computed // self.page_size * self.page_size)
        for group, theirs in enumerate(other.tables):
            if forked.computed < other.computed:
                target = self._own(group, self._free[group].pop(0))
                forked.tables[group].append(target)
                self._copies.append((group, theirs[forked.computed // self.page_size], target))
        self._state_copies.append((other.slot, forked.slot))
        forked.computed, forked.answer = other.computed, list(other.answer)
        return forked

    def _share(self, joined: Driven, other: Driven, shared: int) -> None:
        assert shared % self.page_size == 0
        for group, (own, theirs) in enumerate(zip(joined.tables, other.tables, strict=True)):
            own += [self._own(group, page) for page in theirs[: shared // self.page_size]]
        joined.computed = shared

    def leave(self, sequence: Driven) -> None:
        self.preempt(sequence)
        self._slots.append(sequence.slot)

    def preempt(self, sequence: Driven) -> None:
        """Takes its pages away: all of its tokens have to be computed again."""
        for group, table in enumerate(sequence.tables):
            for page in table:
                self._disown(group, page)
            table.clear()
        sequence.computed = 0

    def some(self, sequence: Driven, count: int) -> tuple[Driven, int]:
        """Returns what a step is to compute: so many tokens, or all if prompts cannot be cut."""
        return sequence, count if self._chunked else len(sequence.tokens) - sequence.computed

    def step(self, counts: Sequence[tuple[Driven, int]], wanted: Mapping[int, int] | None = None) -> torch.Tensor:
        """Computes so many tokens of each; a sequence whose last known token is among them gets the next one."""
        parts = tuple(
            self._part(each, count, (wanted or {}).get(number, 1)) for number, (each, count) in enumerate(counts)
        )
        batch = Batch(parts, tuple(self._copies), tuple(self._state_copies))
        self._copies, self._state_copies = [], []
        with torch.inference_mode():
            logits = self.forward(batch, self.cache).tensor
        assert len(logits) == len(batch.wanted_rows)
        ends = iter(logits.split([part.wanted for part in parts]))
        for (each, count), rows in zip(counts, ends, strict=True):
            each.computed += count
            each.logits.update(zip(range(each.computed - len(rows), each.computed), rows, strict=True))
            if each.computed == len(each.tokens):
                each.answer.append(int(rows[-1].argmax()))
            self._pass_windows(each, each.computed - len(rows) + 1)  # drafts may not stay
        self._poison()
        return logits

    def finish(self, counts: Mapping[int, int], *sequences: Driven) -> None:
        """Decodes all of them together until each has its number of tokens; whoever has them leaves."""
        running = list(sequences)
        for _ in range(200):
            for each in [each for each in running if len(each.answer) >= counts[id(each)]]:
                running.remove(each)
                self.leave(each)
            if not running:
                return
            self.step([(each, len(each.tokens) - each.computed) for each in running])
        raise AssertionError("the sequences never ended")

    def _part(self, sequence: Driven, count: int, wanted: int) -> BatchSequence:
        length = sequence.computed + count
        for group, table in enumerate(sequence.tables):
            while len(table) * self.page_size < length:
                table.append(self._own(group, self._free[group].pop(0)))
        ids = sequence.tokens[sequence.computed : length]
        return BatchSequence(ids, sequence.computed, sequence.tables, wanted, sequence.slot)

    def _own(self, group: int, page: int) -> int:
        self._owners[group][page] += page >= 0
        return page

    def _disown(self, group: int, page: int) -> None:
        if page >= 0:
            self._owners[group][page] -= 1
            if not self._owners[group][page]:
                self._free[group].append(page)

    def _pass_windows(self, sequence: Driven, computed: int) -> None:
        for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            passed = 0 if sequence.keeps else group.oldest_seen(computed) // self.page_size
            for entry in range(min(passed, len(table))):
                self._disown(number, table[entry])
                table[entry] = -1

    @torch.inference_mode()
    def _poison(self) -> None:
        for layer in self.cache.layers.values():
            if layer.keys is not None and layer.values is not None:
                layer.keys[self._free[layer.group]] = torch.nan
                layer.values[self._free[layer.group]] = torch.nan
