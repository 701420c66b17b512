"""The product's scheduler and its slabs without a model: a step writes one column per row, and that is all of it.

Knows nothing of bytes, time or pages. What it does between scheduler and slabs is what ``engine/batches.py`` does; a
test compares the two step by step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.cache_utils import Cache

from mlserver_torch_stream.engine.api import PromptJob
from mlserver_torch_stream.engine.cache.rows import CacheLayout, RowCache
from mlserver_torch_stream.engine.cache.slab import Columns, SlabLayer
from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.scheduler import Group, Limits, Piece, Scheduler
from mlserver_torch_stream.engine.sequence import Job
from mlserver_torch_stream.types import FinishReason, SamplingParameters


@dataclass(slots=True)
class Ledger:
    """Columns of one row each that were written or read for other reasons than a forward; ``largest``: of a copy."""

    moved: int = 0
    largest: int = 0

    def note(self, written: int, read: int) -> None:
        self.moved += written + read


class WatchedSlab(SlabLayer):
    """Keeps account of what its zeros and copies cost; keys and values of a column count as one."""

    ledger: Ledger

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.ledger.note(self.rows * self.capacity, 0)

    def _moved(self, old: torch.Tensor, rows: int, capacity: int, base: int, kept: slice) -> torch.Tensor:
        if old is self.keys:
            copied = min(rows, old.shape[0]) * max(0, kept.stop - kept.start)
            self.ledger.note(rows * capacity + copied, copied)
            self.ledger.largest = max(self.ledger.largest, rows * capacity)
        return super()._moved(old, rows, capacity, base, kept)

    def write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().write(row, keys, values)
        self.ledger.note(self.columns.end - self.base, keys.shape[1])

    def move_row(self, source: int, target: int) -> None:
        super().move_row(source, target)
        self.ledger.note(self.capacity, self.capacity)

    @property
    def held(self) -> int:
        return int(self.keys.shape[0] * self.keys.shape[2]) if self.is_initialized else 0


class WatchedLayout(CacheLayout):
    """One attention layer: what is true of its columns is true of every other's."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(LlamaConfig(num_hidden_layers=1))
        self._ledger = ledger

    def build(self, columns: Columns, rows: int, capacity: int) -> Cache:
        slab = WatchedSlab(columns, rows, capacity)
        slab.ledger = self._ledger
        return Cache(layers=[slab])


@dataclass(frozen=True, slots=True)
class Moment:
    """After a step, in columns of one row: ``live`` hold a token, ``held`` are allocated, ``reserved`` promised.

    ``read``: what attention over rectangles of rows reads in the next step; ``lengths``: of the live rows;
    ``batches``: rectangles.
    """

    lengths: tuple[int, ...]
    held: int
    reserved: int
    read: int
    batches: int

    @property
    def live(self) -> int:
        return sum(self.lengths)


class SlabEngine:
    """``step`` as the batched backend's, over jobs whose answers' lengths are known here alone."""

    def __init__(self, max_rows: int, prefill_tokens: int, columns: int, limits: Callable[[Limits], Limits]) -> None:
        """``columns``: the cache's budget; ``limits``: what it makes of the scheduler's, for its batches."""
        self.scheduler = Scheduler(limits(Limits(max_rows, prefill_tokens, columns, lambda rows, most: rows * most)))
        self.ledger = Ledger()
        self._layout = WatchedLayout(self.ledger)
        self._ends: dict[Job, int] = {}
        self._prefills: dict[Job, RowCache] = {}
        self.batches: dict[Group, RowCache] = {}
        self._finished = 0

    def add(self, job: Job, answer: int) -> None:
        """``answer``: tokens after which the model ends by itself. Raises ValueError where the engine would refuse."""
        if not self.scheduler.fits_alone(1, job.final_length, len(job.prompt)):
            raise ValueError(f"a row of {job.final_length} tokens never fits this budget")
        self._ends[job] = min(answer, job.max_tokens)
        self.scheduler.add(job)

    def step(self) -> int:
        """How many answers have ended in it."""
        self._finished = spent = 0
        while pieces := self.scheduler.pieces(spent=spent):
            for piece in pieces:
                self._prefill(piece)
                spent += self.scheduler.limits.prefill_charge(piece.count)
        for group in [group for group in self.scheduler.groups if group.rows]:
            self._decode(group)
        self._retire()
        return self._finished

    def _prefill(self, piece: Piece) -> None:
        job = piece.job
        if job.prefilled == 0:
            self._prefills[job] = self._layout.cache(capacity=len(job.prompt))
            self._prefills[job].begin_row()
        _write(self._prefills[job], piece.count)
        job.prefilled += piece.count
        if job.ready_ids == 0:
            self._seat(job)

    def _seat(self, job: Job) -> None:
        group = self.scheduler.place(job)
        batch = self.batches.get(group)
        if batch is None:
            batch = self.batches[group] = self._layout.cache(group.row_capacity, group.column_capacity)
        elif batch.allocated != (group.row_capacity, group.column_capacity):
            batch.resize(group.row_capacity, group.column_capacity)
        batch.join(self._prefills[job])
        del self._prefills[job]
        self._take(group, [len(group.rows) - 1])

    def _decode(self, group: Group) -> None:
        _write(self.batches[group], 1)
        self._take(group, range(len(group.rows)))

    def _take(self, group: Group, rows: Sequence[int]) -> None:
        """Gives these rows a token each; those that it ends leave."""
        leaving = set()
        for row in rows:
            answer = group.rows[row]
            answer.tokens.append(0)
            if len(answer.tokens) == self._ends[answer.job]:
                answer.finish_reason = FinishReason.STOP
                del self._ends[answer.job]
                leaving.add(row)
        if leaving:
            self._finished += len(leaving)
            self._remove(group, leaving)
            self._retire()

    def _remove(self, group: Group, leaving: set[int]) -> None:
        batch = self.batches[group]
        order = batch.leave(leaving)
        shrink = self.scheduler.keep(group, order)
        if not order:
            del self.batches[group]
        elif shrink:
            batch.resize(group.row_capacity, group.column_capacity)

    def _retire(self) -> None:
        for group in self.scheduler.retire():
            self.batches.pop(group, None)

    def moment(self) -> Moment:
        caches = [*self.batches.values(), *self._prefills.values()]
        return Moment(
            lengths=tuple(length for each in caches for length in each.lengths),
            held=sum(slab.held for each in caches for slab in each.cache.layers),
            reserved=self.scheduler.reserved_bytes,
            read=sum(len(each.lengths) * each.columns.span for each in caches),
            batches=len(self.batches),
        )


def _write(row_cache: RowCache, columns: int) -> None:
    """What a forward does to a cache."""
    new = _empty(len(row_cache.lengths), columns)
    for slab in row_cache.slabs:
        slab.update(new, new)
    row_cache.commit(columns)


@cache
def _empty(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros((1, 1, 1, 1), dtype=torch.uint8).expand(rows, 1, columns, 1)


def job_of(prompt: int, asked: int, order: int, context: int) -> Job:
    """``order``: first come, first served, where the product's fair shares would let short requests pass."""
    given = PromptJob((0,) * prompt, SamplingParameters(max_tokens=asked, ignore_eos=True), priority=order)
    return Job.of(given, _mailbox(), _NoText(), (), context)  # type: ignore[arg-type]


class _NoText:
    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return ""


@cache
def _mailbox() -> Mailbox:
    """Nobody reads it: a loop that is closed will do."""
    loop = asyncio.new_event_loop()
    loop.close()
    return Mailbox(loop, 1, lambda mailbox: None)
