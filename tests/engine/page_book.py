"""Assigns the pages of a cache to sequences, for tests that call forwards without a scheduler."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.interface import Forward
from tests.engine.tiny_models import prompt_of, reference


@dataclass(eq=False)
class Held:
    """A sequence's block tables, how many of its tokens are in the cache, and the slot of its states."""

    tables: tuple[array[int], ...]
    slot: int = -1
    computed: int = 0
    keeps: bool = False  # pages that a window has passed, so that other sequences can share them


class PageBook:
    """Assigns pages to sequences, which are named by strings.

    Fills all free pages with NaN, also those behind a window.
    """

    def __init__(self, model: PreTrainedModel, page_size: int = 16, pages: int = 128, slots: int = 0) -> None:
        layout = CacheLayout(model.config)
        self.groups = layout.spec(page_size).groups
        self.page_size = page_size
        self.cache = PagedCache(layout, page_size, [pages] * len(self.groups), state_slots=slots)
        self.held: dict[str, Held] = {}
        self._holders = [[0] * pages for _ in self.groups]
        self._free = [random.Random(group).sample(range(pages), pages) for group in range(len(self.groups))]

    def batch(self, work: Mapping[str, Sequence[int]], wanted: int | Mapping[str, int] = 1) -> Batch:
        """Returns a batch with new tokens of new or existing sequences; the last ``wanted`` of them need logits."""
        wants = dict.fromkeys(work, wanted) if isinstance(wanted, int) else wanted
        for name in work:
            self.held.setdefault(name, Held(self.no_pages()))
        return Batch(tuple(self.part(self.held[name], ids, wants.get(name, 1)) for name, ids in work.items()))

    def step(
        self, forward: Forward, work: Mapping[str, Sequence[int]], wanted: int | Mapping[str, int] = 1
    ) -> dict[str, torch.Tensor]:
        """Runs a batch; returns each sequence's logits ``[wanted, vocabulary]``."""
        batch = self.batch(work, wanted)
        rows = forward(batch, self.cache).tensor.clone().split([each.wanted for each in batch.sequences])
        for name, ids in work.items():
            self.advance(self.held[name], len(ids))
        self.poison()
        return dict(zip(work, rows, strict=True))

    def share(self, name: str, other: str, tokens: int) -> None:
        """Begins a sequence that shares the pages of another's first ``tokens``, computed yet or not."""
        self.held[name] = Held(self.no_pages())
        self.take_over(self.held[name], self.held[other], tokens)

    # --- pages ---

    def no_pages(self) -> tuple[array[int], ...]:
        return tuple(array("i") for _ in self.groups)

    def part(self, held: Held, ids: Sequence[int], wanted: int) -> BatchSequence:
        """Returns a sequence's part of a batch, after assigning pages for its new tokens ``ids``."""
        for group, table in enumerate(held.tables):
            while len(table) * self.page_size < held.computed + len(ids):
                table.append(self.take(group))
        return BatchSequence(tuple(ids), held.computed, held.tables, wanted, held.slot)

    def advance(self, held: Held, tokens: int, drafts: int = 0) -> None:
        """Counts tokens as computed, with ``drafts`` that may be rejected, and frees pages behind the window."""
        held.computed += tokens
        for number, (group, table) in enumerate(zip(self.groups, held.tables, strict=True)):
            passed = 0 if held.keeps else group.oldest_seen(held.computed - drafts) // self.page_size
            for entry in range(min(passed, len(table))):
                self._give_back(number, table[entry])
                table[entry] = -1

    def take_over(self, held: Held, other: Held, tokens: int) -> None:
        """Begins a sequence that shares the pages of another's first ``tokens``."""
        assert tokens % self.page_size == 0
        for group, (own, theirs) in enumerate(zip(held.tables, other.tables, strict=True)):
            own.extend(self._hold(group, page) for page in theirs[: tokens // self.page_size])
        held.computed = tokens

    def take(self, group: int) -> int:
        return self._hold(group, self._free[group].pop(0))

    def clear(self, held: Held) -> None:
        """Frees a sequence's pages, so that all of its tokens have to be computed again."""
        for group, table in enumerate(held.tables):
            for page in table:
                self._give_back(group, page)
            del table[:]
        held.computed = 0

    def _hold(self, group: int, page: int) -> int:
        self._holders[group][page] += page >= 0
        return page

    def _give_back(self, group: int, page: int) -> None:
        if page >= 0:
            self._holders[group][page] -= 1
            if not self._holders[group][page]:
                self._free[group].append(page)

    @torch.inference_mode()
    def poison(self) -> None:
        for layer in self.cache.layers.values():
            if layer.keys is not None and layer.values is not None:
                layer.keys[self._free[layer.group]] = torch.nan
                layer.values[self._free[layer.group]] = torch.nan


def prefilled(
    forward: Forward, model: PreTrainedModel, ids: Sequence[int], chunk: int, page_size: int = 16
) -> tuple[torch.Tensor, PageBook]:
    """Computes a prompt in chunks.

    Returns the logits of its last token, and its pages, which belong to the sequence "row".
    """
    book = PageBook(model, page_size, pages=2 + len(ids) // page_size + 64 // page_size)
    for first in range(0, len(ids), chunk):
        last = first + chunk >= len(ids)
        logits = book.step(forward, {"row": ids[first : first + chunk]}, int(last))
    return logits["row"][0].float(), book


def answers(
    model: PreTrainedModel, forward: Forward, requests: Sequence[tuple[int, int]], chunk: int
) -> list[list[int]]:
    """Returns greedy answers; ``requests`` are pairs of a prompt's length and the length of its answer.

    A prompt begins every second step. A step computes chunks of prompts together with the newest tokens of answers.
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
    """Returns what transformers' ``generate`` answers to the requests of ``answers``, one after the other."""
    return [reference(model, prompt_of(length, n), count) for n, (length, count) in enumerate(requests)]


def errors_of(forwards: Mapping[str, Forward], model: PreTrainedModel, exact: PreTrainedModel) -> dict[str, float]:
    """Returns each forward's summed squared error against ``exact``, at the ends of prompts and one token later."""
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
