"""Schedules the work of each step: admission by slots and memory, prefill in chunks, and the batch of each sequence.

Decides and returns the work; it imports no torch, runs nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from mlserver_torch_stream.engine.open_prompts import OpenPrompts
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduling.fair_queue import FairQueue

_SHORT = 256  # tokens: shorter sequences count as equally long
# Spare columns: the columns that a batch no longer needs are moved out once in `capacity / 9` steps.
_SLACK = 1.125
_LEAST_SLACK = 1.0625  # a cache with as much to spare is not moved for a new request
# A cache shrinks when this part of its rows or columns is enough. With these three constants it takes 0.6 of the memory
# of powers of two with a quarter to spare, and moves rows about as often (benchmarks/results/cache_layout.md).
_SHRINK = 1 / 2

# On a CPU a forward of few tokens reads all weights for them. The embedded model takes 14 ms for one token, and 0.33 ms
# for each further token of a long chunk (benchmarks/LOG.md): 16 alone take as long as 45 to 60 of those.
_PREFILL_FLOOR = 64

Cost = Callable[[int, int], int]
"""Returns the bytes of a cache of (rows, columns)."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``prefill_tokens`` bounds the prompt tokens of one step; None: each prompt is prefilled whole.

    A prefill forward counts as ``prefill_floor`` tokens at least, so one step runs at most
    ``ceil(prefill_tokens / prefill_floor)`` of them, however short the prompts are.

    ``stages`` batches of about one length can decode at the same time, with at most ``batches`` for each stage. A batch
    pays for its longest sequence, and each batch is a forward: sequences whose lengths differ more than ``spread``
    times are in different batches while there are fewer. With ``joint``, one forward takes all batches, and a new batch
    is better than one that has to move because it grows.
    """

    max_num_seqs: int
    prefill_tokens: int | None
    cache_bytes: int
    cost: Cost
    stages: int = 1
    batches: int = 4
    spread: int = 4
    joint: bool = False
    prefill_floor: int = _PREFILL_FLOOR

    def prefill_charge(self, tokens: int) -> int:
        """Returns how much of a step's ``prefill_tokens`` a forward of so many prompt tokens uses up."""
        return max(tokens, self.prefill_floor)


def joint_limits(limits: SchedulerLimits) -> SchedulerLimits:
    """Returns the limits for a joint forward, to which more batches of more equal lengths cost little.

    With the lengths of a public trace a cache has 2.9 columns for each live one instead of 5.7
    (benchmarks/results/cache_layout.md).
    """
    return replace(limits, joint=True, batches=8, spread=2)


@dataclass(eq=False, slots=True)
class DecodeBatch:
    """Sequences that decode together, requests that will join them, and the capacity of their cache."""

    sequences: list[SequenceState] = field(default_factory=list)
    expected: list[RequestState] = field(default_factory=list)
    row_capacity: int = 0
    column_capacity: int = 0

    @property
    def lengths(self) -> list[int]:
        return [sequence.length for sequence in self.sequences] + [len(request.prompt) for request in self.expected]

    @property
    def size(self) -> int:
        """Sequences in the batch, and those of the expected requests."""
        return len(self.sequences) + sum(request.params.n for request in self.expected)

    def wanted(self) -> tuple[int, int]:
        """Returns the rows and columns that its sequences can come to need."""
        return row_step(self.size), column_step(self._longest())

    def needed(self, request: RequestState | None = None) -> tuple[int, int]:
        """Returns the capacity that the batch needs, with ``request`` if given: the present one while it has room."""
        rows, longest = self.size + (request.params.n if request else 0), self._longest(request)
        fits = longest * _LEAST_SLACK <= self.column_capacity
        return (
            self.row_capacity if rows <= self.row_capacity else row_step(rows),
            self.column_capacity if fits else column_step(longest),
        )

    def has_room(self, request: RequestState) -> bool:
        """Whether ``request`` can join without moving the cache."""
        return not self.sequences or self.needed(request) == (self.row_capacity, self.column_capacity)

    def _longest(self, request: RequestState | None = None) -> int:
        requests = [*(sequence.request for sequence in self.sequences), *self.expected, *([request] if request else [])]
        return max((each.final_length for each in requests), default=0)

    def takes(self, length: int, spread: int) -> bool:
        lengths = [max(_SHORT, each) for each in (*self.lengths, length)]
        return max(lengths) <= spread * min(lengths)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next ``count`` ids of a request's prompt, which the next forward prefills."""

    request: RequestState
    count: int


class Scheduler:
    """Admits waiting requests in the queue's order while there are slots and memory, and keeps account of both.

    It admits an open prompt when that is whole. Until then its ids are prefilled in memory that no admitted request
    needs; the scheduler frees this memory for the next request that would have no room otherwise.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting = FairQueue()
        self.open_prompts = OpenPrompts(limits.cost, row_step)
        self.prefilling: list[RequestState] = []
        self.batches: list[DecodeBatch] = []
        self._targets: dict[RequestState, DecodeBatch] = {}

    @property
    def running_sequences(self) -> int:
        return sum(len(batch.sequences) for batch in self.batches)

    @property
    def reserved_bytes(self) -> int:
        decoding = sum(self.limits.cost(*batch.needed()) for batch in self.batches)
        return decoding + self.open_prompts.bytes + sum(map(self._prefill_bytes, self.prefilling))

    def fits_alone(self, sequences: int, final_length: int, prompt: int) -> bool:
        """Whether a request of this size could run on an idle engine."""
        need = bytes_alone(self.limits.cost, sequences, final_length, prompt)
        return sequences <= self.limits.max_num_seqs and need <= self.limits.cache_bytes

    def add(self, request: RequestState) -> None:
        if request.sealed:
            self.waiting.add(request)
        else:
            self.open_prompts.requests.append(request)

    def chunks(
        self, busy: Collection[RequestState] = (), most: int | None = None, spent: int = 0
    ) -> list[PrefillChunk]:
        """Returns the chunks to prefill in this step: of begun prompts, of new requests, then of open prompts.

        A prompt of a higher priority comes before the rest of begun ones. There are at most ``most``, and none of
        ``busy`` requests, whose last chunk is still in a forward. The forwards of this step have used up ``spent``
        tokens already.
        """
        left = self.limits.prefill_tokens
        if spent:
            left = max(0, left - spent) if left is not None else 0
        chunks: list[PrefillChunk] = []
        for request in self.open_prompts.take_whole(busy):
            self.waiting.add(request)
        for request in sorted(self.prefilling, key=lambda each: each.priority):
            while (
                (left is None or left > 0)
                and len(chunks) != most
                and self.waiting.has_before(request.priority)
                and (urgent := self._admit(busy)) is not None
            ):
                if urgent not in busy:
                    left = self._take(urgent, left, chunks)
            if request not in busy and len(chunks) != most:
                left = self._take(request, left, chunks)
        while (left is None or left > 0) and len(chunks) != most and (newcomer := self._admit(busy)) is not None:
            if newcomer not in busy:
                left = self._take(newcomer, left, chunks)
        for request in self.open_prompts.requests:
            if (
                left is not None
                and request not in busy
                and len(chunks) != most
                and self._can_prefill_ahead(request, left)
            ):
                left = self._take(request, left, chunks)
        return chunks

    def _can_prefill_ahead(self, request: RequestState, left: int) -> bool:
        if not request.ahead or min(request.ready_ids, left) <= 0:
            return False
        return self.open_prompts.reserve(request, self.limits.cache_bytes - self.reserved_bytes)

    def _take(self, request: RequestState, left: int | None, chunks: list[PrefillChunk]) -> int | None:
        if left is None:
            # Prompts that cannot be cut: one per step, so that sequences decode between two of them.
            if request.sealed and request.ready_ids > 0 and not chunks:
                chunks.append(PrefillChunk(request, request.ready_ids))
            return 0 if chunks else None
        count = min(request.ready_ids, left)
        if count <= 0:
            return left
        chunks.append(PrefillChunk(request, count))
        return left - self.limits.prefill_charge(count)

    def _admit(self, busy: Collection[RequestState]) -> RequestState | None:
        slots = self.running_sequences + sum(request.params.n for request in self.prefilling)
        if slots >= self.limits.max_num_seqs:
            return None
        reserved = self.reserved_bytes - self.open_prompts.bytes_to_spare(busy)
        admitted = self.waiting.admit(lambda request: self._choose(request, self.limits.max_num_seqs - slots, reserved))
        if admitted is None:
            return None
        request, batch = admitted
        batch.expected.append(request)
        if batch not in self.batches:
            self.batches.append(batch)
        self._targets[request] = batch
        self.prefilling.append(request)
        self.open_prompts.remove(request)
        self.open_prompts.give_up(self.reserved_bytes - self.limits.cache_bytes, busy)
        return request

    def _choose(self, request: RequestState, free_slots: int, reserved: int) -> DecodeBatch | None:
        """Returns the batch that the request joins: one of its length, or a new one, as the memory allows."""
        if request.params.n > free_slots:
            return None
        free = self.limits.cache_bytes - reserved - self._prefill_bytes(request)
        for batch in self._candidates(request, free_slots, free):
            now = self.limits.cost(*batch.needed()) if batch in self.batches else 0
            if self.limits.cost(*batch.needed(request)) - now <= free:
                return batch
        return None

    def _candidates(self, request: RequestState, free_slots: int, free: int) -> Sequence[DecodeBatch]:
        """Returns the batches that the request can join, the best first."""
        stages = self.limits.stages
        alike = [batch for batch in self.batches if batch.takes(len(request.prompt), self.limits.spread)]
        if stages > 1:
            alike.sort(key=lambda batch: batch.size)
        full = len(self.batches) >= self.limits.batches * stages
        if self.limits.joint:
            roomy = [batch for batch in alike if batch.has_room(request)]
            new = [] if full else [self._new_batch(request, alike, free_slots, free)]
            return [*roomy, *new, *(batch for batch in alike if batch not in roomy)] or self.batches
        if full:
            return alike or self.batches
        # Each stage gets a batch before any batch gets a second sequence.
        alike.insert(0 if len(alike) < stages else len(alike), DecodeBatch())
        return alike

    def _new_batch(
        self, request: RequestState, alike: Sequence[DecodeBatch], free_slots: int, free: int
    ) -> DecodeBatch:
        """Returns a new batch. It has room for the waiting requests too, if half of the free memory is enough."""
        ahead = min(free_slots, max(request.params.n + len(self.waiting) - 1, sum(batch.size for batch in alike)))
        capacity = row_step(max(request.params.n, ahead)), column_step(request.final_length)
        return DecodeBatch([], [], *capacity) if 2 * self.limits.cost(*capacity) <= free else DecodeBatch()

    def _prefill_bytes(self, request: RequestState) -> int:
        return self.limits.cost(1, self.open_prompts.columns(request))

    def is_admitted(self, request: RequestState) -> bool:
        return request in self._targets

    def target(self, request: RequestState) -> DecodeBatch:
        """Returns the batch that an admitted request will join."""
        return self._targets[request]

    def place(self, request: RequestState) -> DecodeBatch:
        """Moves a prefilled request's sequences into their batch and sets the capacity of its cache."""
        batch = self._targets[request]
        batch.row_capacity, batch.column_capacity = batch.needed()
        self.drop(request)
        batch.sequences += request.sequences
        return batch

    def drop(self, request: RequestState) -> None:
        """Forgets a request that is not in a batch: it was cancelled, it failed, or ``place`` puts it there now."""
        if request in self._targets:
            batch = self._targets.pop(request)
            batch.expected.remove(request)
            self.prefilling.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.open_prompts.remove(request)

    def keep(self, batch: DecodeBatch, order: list[int]) -> bool:
        """Keeps the sequences at these old indices, in this order. Returns True if the cache should shrink."""
        batch.sequences = [batch.sequences[row] for row in order]
        rows, columns = batch.wanted()
        if rows > _SHRINK * batch.row_capacity and columns > _SHRINK * batch.column_capacity:
            return False
        batch.row_capacity, batch.column_capacity = max(1, rows), max(1, columns)
        return True

    def retire(self) -> list[DecodeBatch]:
        """Removes and returns the batches without sequences and expected requests."""
        empty = [batch for batch in self.batches if not batch.sequences and not batch.expected]
        self.batches = [batch for batch in self.batches if batch.sequences or batch.expected]
        return empty


def longest_sequence(cost: Cost, cache_bytes: int, max_model_len: int) -> int:
    """Returns the most tokens, prompt included, of a single sequence for which ``cache_bytes`` are enough."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        fits = bytes_alone(cost, 1, middle, middle) <= cache_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def bytes_alone(cost: Cost, rows: int, final_length: int, prompt: int) -> int:
    """Returns the bytes of a batch with one request only, and of its prompt's cache until it joins the batch."""
    return cost(row_step(rows), column_step(final_length)) + cost(1, prompt)


def row_step(rows: int) -> int:
    """Rounds up the rows of a cache to one of four sizes per power of two, so that a growing batch is copied rarely."""
    step = max(1, (1 << max(0, rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


def column_step(length: int) -> int:
    return -(-int(length * _SLACK) // 16) * 16
