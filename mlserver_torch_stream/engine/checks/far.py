"""Compares logits at far positions without computing a long sequence.

The check fills two caches: transformers' own cache, and a paged one with only a few pages, which a long block table
repeats. Both caches repeat the keys and values of a short sequence. The next tokens must get the same logits with both
caches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from mlserver_torch_stream.engine.cache.budget import free_bytes
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence, LayerGroup, in_all
from mlserver_torch_stream.engine.checks.logits import far_columns
from mlserver_torch_stream.engine.checks.trial import Trial, TrialSequence
from mlserver_torch_stream.engine.config_fields import comparable_context, named_lengths
from mlserver_torch_stream.engine.machine import read_host

logger = logging.getLogger(__name__)

_COLUMNS = 5  # tokens of the short sequence, whose keys and values are repeated
_MIDDLE = 2  # pages that a long table names again and again
# transformers' own cache of one sequence may take half of the weights' bytes and half of the free memory, because each
# layer is copied when it gets the new tokens.
_PART = 2


def far_lengths(trial: Trial, room: int | None, more: Sequence[int] = ()) -> list[int]:
    """Returns the lengths to compare: longer than the trial's sequences, but within the context and the memory.

    ``room`` is the number of bytes for caches; None means the bytes that are free on the devices now. ``more`` are
    shorter lengths that are also compared.
    """
    model, specs = trial.expected.model, trial.cache.specs
    config = model.config.get_text_config(decoder=True)
    named = named_lengths(config) | {window for window in trial.layout.windows if window is not None} | set(more)
    wanted = [length for length in sorted(named) if trial.longest < length < comparable_context(model)]
    if not wanted or not specs:
        return []
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    room = min(free_bytes(specs, read_host()).values(), default=0) if room is None else room
    spec, most = in_all(specs.values()), min(weights, room) // _PART
    lengths = [length for length in wanted if length in more or spec.state_bytes + length * spec.token_bytes <= most]
    if left := sorted(set(wanted) - set(lengths)):
        why = f"their cache would have more than {most} bytes"
        logger.info("positions from %d on are not compared at load: %s", left[0], why)
    return lengths


def compare_far(trial: Trial, short: TrialSequence, length: int, page_size: int) -> str | None:
    """Compares the last token below ``length``, the first token above and, if the trial is chunked, a chunk above.

    ``short`` is a short sequence in the trial's cache. It is also in the batches, and its keys and values fill the far
    cache. Returns how much the logits differ and where; None if they agree.
    """
    counts = [2, 1, 2] if trial.chunked else [1, 1]
    if length + 3 > comparable_context(trial.expected.model):
        counts = counts[:2]
    first = length - counts[0]
    far = _FarCache(trial, short, first, page_size, sum(counts))
    tokens = [trial.token(first + number) for number in range(sum(counts))]
    sample = short.ids[: short.computed]
    expected = trial.expected.far(sample, far.columns, far.indices(0, first), tokens, trial.chunked)
    alone = trial.expected.near(short.ids)
    compared = {}
    for end, count in zip(accumulate(counts), counts, strict=True):
        near_end = short.computed + end
        batch = Batch(
            (far.long_part(tokens[end - count : end], end), far.short_part(short.ids[near_end - count : near_end], end))
        )
        got = trial.forward(batch, far.cache).tensor
        compared[first + end - 1] = comparison = trial.new_comparison()
        comparison.add(expected[end - 1], got[0])
    comparison.add(alone[near_end - 1], got[1])
    for position, each in compared.items():
        if (difference := each.difference) is not None:
            return f"{difference} at position {position}"
    return None


class _FarCache:
    """A few pages with a sequence of ``first`` tokens and a short sequence; both have room for ``more`` tokens."""

    def __init__(self, trial: Trial, short: TrialSequence, first: int, page_size: int, more: int) -> None:
        layout = trial.layout
        self._first = first
        self._size = page_size
        self._short = short
        self.columns = max(1, min([_COLUMNS, *(span - 1 for span in layout.windows if span is not None)]))
        tail = range(first // page_size, -(-(first + more) // page_size))
        self._own = {0: 0, **{entry: 1 + _MIDDLE + number for number, entry in enumerate(tail)}}
        used = 1 + _MIDDLE + len(tail)
        near = -(-(short.computed + more) // page_size)
        self._near = list(range(used, used + near))
        self._entries = tail.stop
        groups = layout.spec(page_size).groups
        self.cache = PagedCache(layout, page_size, [used + near] * len(groups), state_slots=2)
        for index, pages in self.cache.layers.items():
            if trial.cache.layers[index].keys is not None:
                self._fill(pages, trial.cache.layers[index], trial.cache.groups[pages.group])
        if self.cache.states is not None and trial.cache.states is not None:
            for slot in (0, 1):
                self.cache.states.put([slot], trial.cache.states.take([short.slot]))

    def long_part(self, tokens: Sequence[int], end: int) -> BatchSequence:
        """Returns the long sequence's part of a step; after this step the sequence has ``end`` new tokens."""
        start = self._first + end - len(tokens)
        tables = (self._passed(group, start) for group in self.cache.groups)
        return BatchSequence(tokens, start, tuple(tables), state_slot=self._slot(0))

    def short_part(self, tokens: Sequence[int], end: int) -> BatchSequence:
        start = self._short.computed + end - len(tokens)
        return BatchSequence(tokens, start, (tuple(self._near),) * len(self.cache.groups), state_slot=self._slot(1))

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Returns, for each position, the index of the repeated key that is there.

        All middle pages have the same content.
        """
        return torch.arange(start, stop) % (_MIDDLE * self._size) % self.columns

    def _slot(self, slot: int) -> int:
        return -1 if self.cache.states is None else slot

    def _page(self, entry: int) -> int:
        return self._own.get(entry, 1 + entry % _MIDDLE)

    def _passed(self, group: LayerGroup, start: int) -> tuple[int, ...]:
        """Returns the long sequence's block table for a group; pages that the group's window has passed are missing."""
        passed = group.oldest_seen(start) // self._size
        return tuple(-1 if entry < passed else self._page(entry) for entry in range(self._entries))

    def _fill(self, pages: LayerPages, near: LayerPages, group: LayerGroup) -> None:
        """Writes a layer's keys and values for the short sequence, and repeated copies for the long sequence."""
        computed, table = self._short.computed, self._short.tables[near.group]
        oldest = next(entry for entry, page in enumerate(table) if page >= 0) * near.page_size
        keys, values = near.read(table, oldest, computed)
        self._write(pages, self._near, oldest, keys, values)
        keys, values = keys[:, -self.columns :], values[:, -self.columns :]
        for entry in sorted({0, *range(1, 1 + _MIDDLE), *self._own}):
            start, stop = entry * self._size, min(self._first, (entry + 1) * self._size)
            if start < stop:
                part = far_columns(keys, values, self.indices(start, stop), start, self._first)
                self._write(pages, {entry: self._page(entry)}, start, *part)

    def _write(
        self,
        pages: LayerPages,
        table: Mapping[int, int] | Sequence[int],
        start: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Stores ``[kv_heads, positions, head_dim]`` from the position ``start`` on."""
        positions = range(start, start + keys.shape[1])
        slots = [table[position // self._size] * self._size + position % self._size for position in positions]
        pages.write(keys.transpose(0, 1), values.transpose(0, 1), torch.tensor(slots, device=keys.device))
