"""Who runs next: admission by rows and memory, prefill in pieces, and which batch a row joins.

Decides and returns what to do; it imports no torch, runs nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from mlserver_torch_stream.engine.open_prompts import OpenPrompts
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduling.fair_queue import FairQueue

_SHORT = 256  # columns below which rows count as equally long
# Spare columns: what has left a batch at its old end is moved out once in `capacity / 9` steps.
_SLACK = 1.125
_LEAST_SLACK = 1.0625  # with that much to spare nothing is moved for a newcomer
# A cache is made smaller when this part of its rows or columns would do. These three rules hold 0.6 of what powers of
# two, a quarter to spare and a quarter left did, and move rows about as often (benchmarks/results/cache_layout.md).
_SHRINK = 1 / 2

# On a CPU a forward of few tokens reads all weights for them. The embedded model takes 14 ms for one token, and 0.33 ms
# for each token that a long piece of a prompt has more (benchmarks/LOG.md): 16 alone take as long as 45 to 60 of those.
_PREFILL_FLOOR = 64

Cost = Callable[[int, int], int]
"""Bytes of a cache of (rows, columns)."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``prefill_tokens`` bounds the prompt tokens of one step, None: prompts are prefilled whole.

    A prefill forward counts as ``prefill_floor`` tokens at least, so that one step never runs more than
    ``ceil(prefill_tokens / prefill_floor)`` of them, however short the prompts are.
    ``stages``: batches of rows of about one length that can be decoded at the same time. There are at most ``batches``
    for each, and rows whose lengths differ more than ``spread`` times are in different ones as long as there are fewer:
    every row of a batch pays for its longest, and every batch is a forward. ``joint``: one forward takes all of them,
    and a new one is better than one that is moved because it grows.
    """

    max_rows: int
    prefill_tokens: int | None
    cache_bytes: int
    cost: Cost
    stages: int = 1
    batches: int = 4
    spread: int = 4
    joint: bool = False
    prefill_floor: int = _PREFILL_FLOOR

    def prefill_charge(self, tokens: int) -> int:
        """What a forward of so many prompt tokens takes of a step's ``prefill_tokens``."""
        return max(tokens, self.prefill_floor)


def joint_limits(limits: SchedulerLimits) -> SchedulerLimits:
    """Where one forward takes all batches, more of them, of rows more alike, cost little.

    Lengths of a public trace held 2.9 columns for each live one instead of 5.7 (benchmarks/results/cache_layout.md).
    """
    return replace(limits, joint=True, batches=8, spread=2)


@dataclass(eq=False, slots=True)
class DecodeBatch:
    """Rows that are decoded together, those that are expected, and how large their cache is."""

    rows: list[SequenceState] = field(default_factory=list)
    expected: list[RequestState] = field(default_factory=list)
    row_capacity: int = 0
    column_capacity: int = 0

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows] + [len(request.prompt) for request in self.expected]

    @property
    def size(self) -> int:
        """Rows that are here or expected."""
        return len(self.rows) + sum(request.rows for request in self.expected)

    def wanted(self) -> tuple[int, int]:
        """Rows and columns that everybody here can come to need."""
        return row_step(self.size), column_step(self._longest())

    def needed(self, request: RequestState | None = None) -> tuple[int, int]:
        """The least capacity with ``job`` too, which is the present one as long as that has room."""
        rows, longest = self.size + (request.rows if request else 0), self._longest(request)
        fits = longest * _LEAST_SLACK <= self.column_capacity
        return (
            self.row_capacity if rows <= self.row_capacity else row_step(rows),
            self.column_capacity if fits else column_step(longest),
        )

    def has_room(self, request: RequestState) -> bool:
        """Whether nothing has to be moved for it."""
        return not self.rows or self.needed(request) == (self.row_capacity, self.column_capacity)

    def _longest(self, request: RequestState | None = None) -> int:
        requests = [*self.expected, *([request] if request else [])]
        return max([row.final_length for row in self.rows] + [each.final_length for each in requests], default=0)

    def takes(self, length: int, spread: int) -> bool:
        bounds = [max(_SHORT, each) for each in (*self.lengths, length)]
        return max(bounds) <= spread * min(bounds)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next ``count`` ids of a request's prompt, to be prefilled now."""

    request: RequestState
    count: int


class Scheduler:
    """Admits waiting requests in their queue's order while rows and memory last, and keeps account of both.

    An open prompt is admitted when it is whole. What has come of it is prefilled ahead, in memory that no admitted
    request needs: it is billed for what has come, and given up for the next request that it would keep out.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting = FairQueue()
        self.open_prompts = OpenPrompts(limits.cost, row_step)
        self.prefilling: list[RequestState] = []
        self.groups: list[DecodeBatch] = []
        self._targets: dict[RequestState, DecodeBatch] = {}

    @property
    def running_sequences(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @property
    def reserved_bytes(self) -> int:
        batches = sum(self.limits.cost(*group.needed()) for group in self.groups)
        return batches + self.open_prompts.bytes + sum(map(self._prefill_bill, self.prefilling))

    def fits_alone(self, rows: int, final_length: int, prompt: int) -> bool:
        """Whether a request could run on an idle engine."""
        need = bytes_alone(self.limits.cost, rows, final_length, prompt)
        return rows <= self.limits.max_rows and need <= self.limits.cache_bytes

    def longest_row(self, max_model_len: int) -> int:
        """The most tokens that a single row can hold, prompt and answer together."""
        low, high = 0, max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits_alone(1, middle, middle) else (low, middle - 1)
        return low

    def add(self, request: RequestState) -> None:
        if request.sealed:
            self.waiting.add(request)
        else:
            self.open_prompts.requests.append(request)

    def chunks(
        self, busy: Collection[RequestState] = (), most: int | None = None, spent: int = 0
    ) -> list[PrefillChunk]:
        """The prompt ids to prefill in this step: of those begun, of newcomers while they fit, then of open prompts.

        At most ``most`` pieces, and none of requests that are ``busy``: their last piece is still under way. ``spent``:
        what the forwards of this step have been charged already.
        """
        left = self.limits.prefill_tokens
        if spent:
            left = max(0, left - spent) if left is not None else 0
        chunks: list[PrefillChunk] = []
        for request in self.open_prompts.take_whole(busy):
            self.waiting.add(request)
        for request in self.prefilling:
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
            # Prompts that cannot be cut: one per step, so that rows still decode between two of them.
            if request.sealed and request.ready_ids > 0 and not chunks:
                chunks.append(PrefillChunk(request, request.ready_ids))
            return 0 if chunks else None
        count = min(request.ready_ids, left)
        if count <= 0:
            return left
        chunks.append(PrefillChunk(request, count))
        return left - self.limits.prefill_charge(count)

    def _admit(self, busy: Collection[RequestState]) -> RequestState | None:
        rows = self.running_sequences + sum(request.rows for request in self.prefilling)
        if rows >= self.limits.max_rows:
            return None
        reserved = self.reserved_bytes - self.open_prompts.bytes_to_spare(busy)
        admitted = self.waiting.admit(lambda request: self._choose(request, self.limits.max_rows - rows, reserved))
        if admitted is None:
            return None
        request, group = admitted
        group.expected.append(request)
        if group not in self.groups:
            self.groups.append(group)
        self._targets[request] = group
        self.prefilling.append(request)
        self.open_prompts.remove(request)
        self.open_prompts.give_up(self.reserved_bytes - self.limits.cache_bytes, busy)
        return request

    def _choose(self, request: RequestState, free_rows: int, reserved: int) -> DecodeBatch | None:
        """The batch that the request will join: one of its length, or a new one, whichever the memory allows."""
        if request.rows > free_rows:
            return None
        free = self.limits.cache_bytes - reserved - self._prefill_bill(request)
        for group in self._candidates(request, free_rows, free):
            now = self.limits.cost(*group.needed()) if group in self.groups else 0
            if self.limits.cost(*group.needed(request)) - now <= free:
                return group
        return None

    def _candidates(self, request: RequestState, free_rows: int, free: int) -> Sequence[DecodeBatch]:
        """Best first."""
        stages = self.limits.stages
        alike = [group for group in self.groups if group.takes(len(request.prompt), self.limits.spread)]
        if stages > 1:
            alike.sort(key=lambda group: group.size)
        full = len(self.groups) >= self.limits.batches * stages
        if self.limits.joint:
            roomy = [group for group in alike if group.has_room(request)]
            new = [] if full else [self._new_group(request, alike, free_rows, free)]
            return [*roomy, *new, *(group for group in alike if group not in roomy)] or self.groups
        if full:
            return alike or self.groups
        # A batch for each stage before any gets a second row.
        alike.insert(0 if len(alike) < stages else len(alike), DecodeBatch())
        return alike

    def _new_group(self, request: RequestState, alike: Sequence[DecodeBatch], free_rows: int, free: int) -> DecodeBatch:
        """With room for those who wait too, or for as many as there are already, if half of the memory left does."""
        ahead = min(free_rows, max(request.rows + len(self.waiting) - 1, sum(group.size for group in alike)))
        capacity = row_step(max(request.rows, ahead)), column_step(request.final_length)
        return DecodeBatch([], [], *capacity) if 2 * self.limits.cost(*capacity) <= free else DecodeBatch()

    def _prefill_bill(self, request: RequestState) -> int:
        return self.limits.cost(1, self.open_prompts.columns(request))

    def is_admitted(self, request: RequestState) -> bool:
        return request in self._targets

    def target(self, request: RequestState) -> DecodeBatch:
        """The batch that an admitted request is on its way to."""
        return self._targets[request]

    def place(self, request: RequestState) -> DecodeBatch:
        """Moves a prefilled request's sequences into their batch and sets how large its cache must be."""
        group = self._targets[request]
        group.row_capacity, group.column_capacity = group.needed()
        self.drop(request)
        group.rows += request.sequences
        return group

    def drop(self, request: RequestState) -> None:
        """Forgets a request that has not been placed: cancelled, failed, or about to be placed."""
        if request in self._targets:
            group = self._targets.pop(request)
            group.expected.remove(request)
            self.prefilling.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.open_prompts.remove(request)

    def keep(self, group: DecodeBatch, order: list[int]) -> bool:
        """Keeps the rows at these old indices, in this order; True if the group's cache should shrink."""
        group.rows = [group.rows[row] for row in order]
        rows, columns = group.wanted()
        if rows > _SHRINK * group.row_capacity and columns > _SHRINK * group.column_capacity:
            return False
        group.row_capacity, group.column_capacity = max(1, rows), max(1, columns)
        return True

    def retire(self) -> list[DecodeBatch]:
        """Removes and returns the groups that nobody is in or on the way to."""
        empty = [group for group in self.groups if not group.rows and not group.expected]
        self.groups = [group for group in self.groups if group.rows or group.expected]
        return empty


def bytes_alone(cost: Cost, rows: int, final_length: int, prompt: int) -> int:
    """Of the batch that a request is the only one in, and of its prompt's cache until it joins that."""
    return cost(row_step(rows), column_step(final_length)) + cost(1, prompt)


def row_step(rows: int) -> int:
    """Rows of a cache: four sizes from a power of two to the next, so that a growing batch is not copied each time."""
    step = max(1, (1 << max(0, rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


def column_step(length: int) -> int:
    return -(-int(length * _SLACK) // 16) * 16
