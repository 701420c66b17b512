"""Drives a forward over pages without a scheduler: sequences join, leave, fork, share pages and are preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.paged_attention import PagedAttention
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from tests.engine.page_book import Held, PageBook

_SLOTS = 64


@dataclass(eq=False)
class Driven(Held):
    """A sequence with its prompt and greedy answer."""

    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # those of the token at each position

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


class PageDriver:
    """Decodes sequences greedily over a small ``PageBook``."""

    def __init__(
        self,
        model: PreTrainedModel,
        way: Way,
        page_size: int,
        attention: PagedAttention | None = None,
        *,
        chunked: bool = True,
    ) -> None:
        self.page_size = page_size
        self.book = PageBook(model, page_size, 64 + 1600 // page_size, _SLOTS)
        self.cache = self.book.cache
        self.forward = ModelForward(model, way, attention)
        self.has_states = CacheLayout(model.config).has_states
        self._chunked = chunked
        self._slots = list(range(_SLOTS))
        self._copies: list[tuple[int, int, int]] = []
        self._state_copies: list[tuple[int, int]] = []

    def join(self, prompt: Sequence[int], keeps: bool = False) -> Driven:
        return Driven(self.book.no_pages(), self._slots.pop(), keeps=keeps, prompt=list(prompt))

    def join_beside(self, other: Driven, prompt: Sequence[int], shared: int) -> Driven:
        """Adds a sequence whose first ``shared`` tokens are whole pages that it shares with ``other``."""
        assert other.tokens[:shared] == list(prompt)[:shared]
        joined = self.join(prompt)
        self.book.take_over(joined, other, shared)
        return joined

    def fork(self, other: Driven) -> Driven:
        """Adds a second answer to the same prompt: it shares full pages, and copies the last page and the states."""
        forked = self.join(other.prompt)
        self.book.take_over(forked, other, other.computed // self.page_size * self.page_size)
        for group, theirs in enumerate(other.tables):
            if forked.computed < other.computed:
                target = self.book.take(group)
                forked.tables[group].append(target)
                self._copies.append((group, theirs[forked.computed // self.page_size], target))
        self._state_copies.append((other.slot, forked.slot))
        forked.computed, forked.answer = other.computed, list(other.answer)
        return forked

    def leave(self, sequence: Driven) -> None:
        self.preempt(sequence)
        self._slots.append(sequence.slot)

    def preempt(self, sequence: Driven) -> None:
        """Frees the sequence's pages, so that all of its tokens have to be computed again."""
        self.book.clear(sequence)

    def some(self, sequence: Driven, count: int) -> tuple[Driven, int]:
        """Returns the sequence with the number of tokens to compute: ``count``, or all if prompts cannot be split."""
        return sequence, count if self._chunked else len(sequence.tokens) - sequence.computed

    def step(self, counts: Sequence[tuple[Driven, int]], wanted: Mapping[int, int] | None = None) -> torch.Tensor:
        """Computes ``count`` tokens of each sequence; one whose last known token is among them gets its next token."""
        parts = tuple(
            self.book.part(each, each.tokens[each.computed : each.computed + count], (wanted or {}).get(number, 1))
            for number, (each, count) in enumerate(counts)
        )
        batch = Batch(parts, tuple(self._copies), tuple(self._state_copies))
        self._copies, self._state_copies = [], []
        with torch.inference_mode():
            logits = self.forward(batch, self.cache).tensor
        assert len(logits) == len(batch.wanted_rows)
        ends = iter(logits.split([part.wanted for part in parts]))
        for (each, count), rows in zip(counts, ends, strict=True):
            self.book.advance(each, count, drafts=max(0, len(rows) - 1))
            each.logits.update(zip(range(each.computed - len(rows), each.computed), rows, strict=True))
            if each.computed == len(each.tokens):
                each.answer.append(int(rows[-1].argmax()))
        self.book.poison()
        return logits
