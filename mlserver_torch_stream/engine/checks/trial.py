"""Runs a few sequences over one paged cache as a scheduler would, and compares their logits with the expected ones.

Some prompts are computed in chunks and some whole. Sequences leave the batch, share a page, fork, and get several
tokens in one step, as they do when drafts are verified. The pages of a sequence are not adjacent, and new pages contain
old values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.checks.logits import Comparison, ExpectedLogits
from mlserver_torch_stream.engine.config_fields import comparable_context
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.work_threads import raise_if_cancelled

# Kernels work in blocks of 12 and 64 queries, and of 16 and 32 keys: one sequence crosses all of them.
_LONGEST = 70
_SHORTEST = 9  # for models with a smaller context
_LONGEST_CHUNK = 65
_AFTER = 12  # tokens that each sequence can take after its prompt
SPARE_SLOT = 7
_STALE = 1000.0  # finite: a kernel may multiply it with the probability 0 of a key that is not seen


@dataclass(slots=True)
class TrialSequence:
    """A sequence of a trial: its tokens, its page tables, and how many of its tokens are in the cache."""

    ids: list[int]  # the prompt and all tokens after it
    prompt: int
    slot: int
    tables: list[list[int]]
    computed: int = 0


@dataclass(slots=True)
class Trial:
    """Runs the sequences and compares their logits.

    If ``chunked`` is true, prompts are computed in chunks and sequences share pages; otherwise each prompt is computed
    whole. ``same_operations`` is passed to ``Comparison``.
    """

    expected: ExpectedLogits
    layout: CacheLayout
    forward: Forward
    page_size: int
    chunked: bool
    same_operations: bool = False
    longest: int = field(init=False)  # tokens of the longest prompt
    cache: PagedCache = field(init=False)
    last: Batch = field(init=False)  # the last batch that ran; each of its sequences has one token in it
    comparison: Comparison = field(init=False)
    _free: list[Iterator[int]] = field(init=False)  # pages of each group
    _copies: list[tuple[int, int, int]] = field(default_factory=list)
    _state_copies: list[tuple[int, int]] = field(default_factory=list)
    _slots: int = 0

    def __post_init__(self) -> None:
        context = comparable_context(self.expected.model)
        self.longest = max(_SHORTEST, min(_LONGEST, context - _AFTER))
        groups = len(self.layout.spec(self.page_size).groups)
        pages = 4 * (self.longest + _AFTER) // self.page_size + 17
        self.cache = PagedCache(self.layout, self.page_size, [pages] * groups, state_slots=SPARE_SLOT + 1)
        self.comparison = self.new_comparison()
        self._free = [iter([*range(1, pages, 2), *range(0, pages, 2)]) for _ in range(groups)]

    def new_comparison(self) -> Comparison:
        """Returns an empty comparison of logits in the model's dtype."""
        return Comparison(self.expected.dtype, same_operations=self.same_operations)

    def run(self) -> tuple[str | None, TrialSequence]:
        """Returns how much the logits differ (None if they agree), and a short sequence that is still in the cache.

        In full precision the first difference ends the trial.
        """
        a, b, c = self._new(6), self._new(self.longest), self._new(3)
        d = e = None
        for number, parts in enumerate(self._plan(a, b)):
            if number == 2 and self._goes_on and b.computed >= self.page_size:
                d = self._sharing(b)
            if number == 4:
                d = d or self._new(13)
            if number == 5:
                e = self._forked(c)
            named = zip((a, b, c, d, e), parts, strict=True)
            self._step([(sequence, count) for sequence, count in named if count and sequence is not None])
            if self.comparison.is_exact and self.comparison.difference is not None:
                return self.comparison.difference, c
        hidden = None if self.comparison.is_exact else self._disturbed(b, c)
        return self.comparison.difference or hidden, c

    def _disturbed(self, other: TrialSequence, sequence: TrialSequence) -> str | None:
        """Returns how much a sequence's logits change after another sequence has run; None if they do not change.

        This finds states that a model keeps in its own modules. In half precision, other checks can miss such states,
        because their effect is small.
        """
        first = self._tried(sequence)
        self._tried(other)
        comparison = Comparison(torch.float32)
        comparison.add(first, self._tried(sequence))
        return comparison.difference

    def _tried(self, sequence: TrialSequence) -> torch.Tensor:
        """Computes a sequence outside any batch, without changing it, and returns the logits of its next token."""
        start = sequence.computed
        self._make_room(sequence, start + 1)
        copies = ((sequence.slot, SPARE_SLOT),) if sequence.slot >= 0 else ()
        part = BatchSequence(
            sequence.ids[start : start + 1],
            start,
            tuple(map(tuple, sequence.tables)),
            state_slot=SPARE_SLOT if copies else -1,
        )
        return self.forward(Batch((part,), state_copies=copies), self.cache).tensor[0].clone()

    @property
    def _goes_on(self) -> bool:
        """Returns whether a sequence can continue from nothing but its pages, with any number of tokens."""
        return self.chunked and not self.layout.has_states

    def _plan(self, a: TrialSequence, b: TrialSequence) -> list[tuple[int, int, int, int, int]]:
        """Returns the new tokens of each of five sequences at each step.

        The plan has few steps, because even a forward of one token reads all weights.
        """
        whole = 1000  # what is left of a prompt
        drafts = 3 if self._goes_on else 1
        chunks = (
            [(2, 0, 0, 0, 0), (4, max(5, b.prompt - _LONGEST_CHUNK), 0, 0, 0), (1, whole, whole, 0, 0)]
            if self.chunked
            else [(6, 0, 0, 0, 0), (1, whole, 0, 0, 0), (1, 1, whole, 0, 0)]
        )
        return [
            *chunks,
            (1, 1, 1, 0, 0),
            (0, 1, 1, whole, 0),
            (0, drafts, 1, 1, 1),
            (0, 1, 1, 1, 1),
        ]

    def _step(self, parts: Sequence[tuple[TrialSequence, int]]) -> None:
        raise_if_cancelled()
        sequences, ends = [], []
        for sequence, limit in parts:
            left = sequence.prompt - sequence.computed
            count = min(limit, left) if left > 0 else limit
            end = sequence.computed + count
            wanted = 0 if end < sequence.prompt else count if left <= 0 else 1
            self._make_room(sequence, end)
            tables = tuple(tuple(table) for table in sequence.tables)
            sequences.append(
                BatchSequence(sequence.ids[sequence.computed : end], sequence.computed, tables, wanted, sequence.slot)
            )
            ends.append((sequence, end, wanted))
        batch = Batch(tuple(sequences), tuple(self._copies), tuple(self._state_copies))
        self.last = Batch(batch.sequences)
        self._copies, self._state_copies = [], []
        rows = iter(self.forward(batch, self.cache).tensor)
        for sequence, end, wanted in ends:
            for position in range(end - wanted, end):
                self.comparison.add(self.expected.near(sequence.ids)[position], next(rows))
            # Drafts count as rejected, so they are computed again.
            sequence.computed = end if wanted <= 1 else end - wanted + 1

    # --- sequences ---

    def token(self, seed: int) -> int:
        """Returns a token id that depends only on ``seed``."""
        return (seed * 7919 + 13) % self.expected.vocab_size

    def _new(self, prompt: int) -> TrialSequence:
        ids = [self.token(100 * prompt + number) for number in range(prompt + _AFTER)]
        return self._added(ids, prompt, [[] for _ in self._free])

    def _added(self, ids: list[int], prompt: int, tables: list[list[int]]) -> TrialSequence:
        self._slots += 1
        return TrialSequence(ids, prompt, self._slots if self.layout.has_states else -1, tables)

    def _sharing(self, other: TrialSequence) -> TrialSequence:
        """Returns a new sequence that shares the first page of another sequence; that page must be full."""
        size = self.page_size
        ids = other.ids[:size] + [self.token(7000 + number) for number in range(9 + _AFTER)]
        tables = [table[:1] for table in other.tables]
        shared = self._added(ids, size + 9, tables)
        shared.computed = size
        return shared

    def _forked(self, other: TrialSequence) -> TrialSequence:
        """Returns a copy of a sequence that continues with different tokens, on a copy of the newest page."""
        ids = other.ids[: other.computed] + [self.token(9000 + number) for number in range(_AFTER)]
        tables = [list(table) for table in other.tables]
        fork = self._added(ids, other.prompt, tables)
        fork.computed = other.computed
        for group, table in enumerate(tables):
            if other.computed % self.page_size:
                source, table[-1] = table[-1], self._take(group)
                self._copies.append((group, source, table[-1]))
        if fork.slot >= 0:
            self._state_copies.append((other.slot, fork.slot))
        return fork

    # --- pages ---

    def _make_room(self, sequence: TrialSequence, end: int) -> None:
        """Drops the pages that a window has passed, and allocates pages for the new tokens."""
        for group, table in enumerate(sequence.tables):
            passed = self.cache.groups[group].oldest_seen(sequence.computed) // self.page_size
            table[:passed] = [-1] * min(passed, len(table))
            while len(table) * self.page_size < end:
                table.append(self._take(group))

    def _take(self, group: int) -> int:
        page = next(self._free[group])
        for layer in self.cache.layers.values():
            if layer.group == group and layer.keys is not None and layer.values is not None:
                for pool in (layer.keys, layer.values):
                    pool[page] = torch.full_like(pool[page], _STALE)
        return page
