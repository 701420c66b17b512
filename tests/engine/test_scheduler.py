"""The scheduler alone, driven by random arrivals, steps, ends and departures: what must hold at every moment.

Torch-free: a cache is a number of bytes here, and a forward is a counter.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.scheduling.scheduler import (
    DecodeBatch,
    PrefillChunk,
    Scheduler,
    SchedulerLimits,
    column_step,
    longest_sequence,
    row_step,
)
from mlserver_torch_stream.types import FinishReason, SamplingParameters

CONTEXT = 400


class Codec:
    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "x" * len(ids)


LOOP = asyncio.new_event_loop()
LOOP.close()


def job_of(prompt: int, sequence: int, n: int = 1, is_open: bool = False, context: int = CONTEXT) -> RequestState:
    given = EngineRequest((1,) * prompt, SamplingParameters(max_tokens=sequence, n=n), open=is_open)
    return RequestState(given, Mailbox(LOOP, n, lambda: None), Codec(), (), context)  # type: ignore[arg-type]


def cost(rows: int, columns: int) -> int:
    return rows * (50 + 4 * columns + 6 * min(columns, 64))


@dataclass
class Engine:
    """What the batched backend does with a scheduler, less the tensors; the invariants are checked at every turn."""

    limits: SchedulerLimits

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.allocated: dict[DecodeBatch, tuple[int, int]] = {}
        self.started: list[RequestState] = []
        self.prefills: dict[RequestState, int] = {}  # columns of the caches of prompts

    def step(self) -> int:
        spent = total = forwards = 0
        while chunks := self.chunks(spent):
            self.check()
            for chunk in chunks:
                total += chunk.count
                forwards += 1
                spent += self.limits.prefill_charge(chunk.count)
                self.prefill(chunk)
        chunk, floor = self.limits.prefill_tokens, self.limits.prefill_floor
        assert forwards <= (1 if chunk is None else math.ceil(chunk / floor))
        assert chunk is None or total <= chunk
        for batch in [batch for batch in self.scheduler.batches if batch.sequences]:
            self.decode(batch)
        self.retire()
        return total

    def chunks(self, spent: int) -> list[PrefillChunk]:
        chunks = self.scheduler.chunks(spent=spent)
        for request in self.scheduler.open_prompts.take_given_up():
            del self.prefills[request]
        for chunk in chunks:
            assert chunk.request.sealed or chunk.request not in self.scheduler.prefilling
            self.prefills[chunk.request] = self.scheduler.open_prompts.columns(chunk.request)
        return chunks

    def prefill(self, chunk: PrefillChunk) -> None:
        request = chunk.request
        assert 0 < chunk.count <= self.prefills[request] - request.prefilled
        if request.prefilled == 0:
            self.started.append(request)
        request.prefilled += chunk.count
        if request.sealed and request.ready_ids == 0:
            batch = self.scheduler.place(request)
            del self.prefills[request]
            self.allocated[batch] = (batch.row_capacity, batch.column_capacity)
            for sequence in request.sequences:
                self.token(sequence)
            self.leave(
                batch, {row for row, sequence in enumerate(batch.sequences) if sequence.finish_reason is not None}
            )
            self.check()

    def decode(self, batch: DecodeBatch) -> None:
        for sequence in batch.sequences:
            self.token(sequence)
        self.leave(batch, {row for row, sequence in enumerate(batch.sequences) if sequence.finish_reason is not None})
        self.check()

    def token(self, sequence: Any) -> None:
        sequence.tokens.append(1)
        if len(sequence.tokens) >= sequence.request.max_tokens:
            sequence.finish_reason = FinishReason.LENGTH

    def leave(self, batch: DecodeBatch, leaving: set[int]) -> None:
        if leaving:
            order = [row for row in range(len(batch.sequences)) if row not in leaving]
            if self.scheduler.keep(batch, order):
                self.allocated[batch] = (batch.row_capacity, batch.column_capacity)

    def evict(self, request: RequestState) -> None:
        self.scheduler.drop(request)
        self.prefills.pop(request, None)
        for batch in self.scheduler.batches:
            self.leave(batch, {row for row, sequence in enumerate(batch.sequences) if sequence.request is request})
        self.retire()

    def retire(self) -> None:
        for batch in self.scheduler.retire():
            self.allocated.pop(batch, None)
        self.check()

    def check(self) -> None:
        scheduler, limits = self.scheduler, self.limits
        assert scheduler.reserved_bytes <= limits.cache_bytes
        assert (
            scheduler.running_sequences + sum(request.params.n for request in scheduler.prefilling)
            <= limits.max_num_seqs
        )
        in_use = sum(cost(*size) for size in self.allocated.values())
        prefills = sum(cost(1, columns) for columns in self.prefills.values())
        assert in_use + prefills <= scheduler.reserved_bytes  # what is allocated has been reserved
        for batch in scheduler.batches:
            if batch.sequences:
                rows, columns = self.allocated[batch]
                assert len(batch.sequences) <= rows
                # Nobody outgrows the slab, and there is some slack, or it would be moved at every step.
                assert max(sequence.request.final_length for sequence in batch.sequences) * 1.06 <= columns

    @property
    def idle(self) -> bool:
        scheduler = self.scheduler
        return not (scheduler.waiting or scheduler.open_prompts.requests or scheduler.batches or scheduler.prefilling)


JOBS = st.tuples(st.integers(1, CONTEXT - 1), st.integers(1, 120), st.integers(1, 3))
EVENTS = st.one_of(
    st.tuples(st.just("request"), JOBS),
    st.tuples(st.just("open"), JOBS),
    st.tuples(st.just("grow"), st.integers(0, 60)),
    st.tuples(st.just("seal"), st.booleans()),
    st.tuples(st.just("evict"), st.integers(0, 20)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
)
LIMITS = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 9),
    prefill_tokens=st.one_of(st.none(), st.integers(1, 200)),
    cache_bytes=st.integers(cost(1, column_step(CONTEXT)) + cost(1, CONTEXT), 60_000),
    cost=st.just(cost),
    spread=st.sampled_from([2, 4]),
    joint=st.booleans(),
    prefill_floor=st.integers(1, 80),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, events=st.lists(EVENTS, max_size=60))
def test_whatever_comes_and_goes_the_bounds_hold_and_everything_ends(
    limits: SchedulerLimits, events: list[Any]
) -> None:
    engine = Engine(limits)
    requests: list[RequestState] = []
    open_jobs: list[RequestState] = []

    def fits(request: RequestState, prompt: int) -> bool:
        """As the worker asks, each time that a prompt has grown."""
        final = min(CONTEXT, prompt + (request.params.max_tokens or CONTEXT))
        return prompt < CONTEXT and engine.scheduler.fits_alone(request.params.n, final, prompt)

    def submit(prompt: int, sequence: int, n: int, is_open: bool) -> None:
        request = job_of(0 if is_open else prompt, sequence, n, is_open)
        if fits(request, len(request.prompt)):
            engine.scheduler.add(request)
            requests.append(request)
            if is_open:
                open_jobs.append(request)

    def seal(request: RequestState, whole: tuple[int, ...]) -> None:
        if fits(request, len(whole)):
            request.grow(whole, whole=True)
        else:
            requests.remove(request)
            engine.evict(request)

    for name, value in events:
        if name in ("request", "open"):
            submit(*value, name == "open")
        elif name == "grow" and open_jobs and fits(open_jobs[-1], len(open_jobs[-1].prompt) + value):
            open_jobs[-1].grow((1,) * value, whole=False)
        elif name == "seal" and open_jobs:
            request = open_jobs.pop()
            seal(request, (2,) * max(1, len(request.prompt)) if value else (*request.prompt, 1))
        elif name == "evict" and requests:
            gone = requests.pop(value % len(requests))
            if gone in open_jobs:
                open_jobs.remove(gone)
            engine.evict(gone)
        elif name == "steps":
            for _ in range(value):
                engine.step()
        engine.check()
    for request in open_jobs:
        seal(request, (*request.prompt, 1))
    for _ in range(60 * (CONTEXT + 120) * 3):
        if engine.idle:
            break
        engine.step()
    assert engine.idle and engine.scheduler.reserved_bytes == 0
    for request in requests:
        assert all(len(sequence.tokens) == request.max_tokens for sequence in request.sequences)


@settings(max_examples=40, deadline=None)
@given(limits=LIMITS, count=st.integers(2, 30), prompt=st.integers(1, 100), sequence=st.integers(1, 40))
def test_equal_jobs_start_in_the_order_of_arrival(
    limits: SchedulerLimits, count: int, prompt: int, sequence: int
) -> None:
    engine = Engine(limits)
    requests = [job_of(prompt, sequence) for _ in range(count)]
    for request in requests:
        engine.scheduler.add(request)
        engine.step()
    while not engine.idle:
        engine.step()
    assert engine.started == requests


def test_a_job_that_waits_for_room_is_not_overtaken_for_ever() -> None:
    """A stream of small requests would always fit; the large one gets its turn."""
    engine = Engine(SchedulerLimits(max_num_seqs=4, prefill_tokens=64, cache_bytes=40_000, cost=cost))
    for _ in range(3):
        engine.scheduler.add(job_of(4, 30))
    engine.step()
    large = job_of(300, 100, n=4)
    engine.scheduler.add(large)
    for step in range(3_000):
        if step % 4 == 0:
            engine.scheduler.add(job_of(4, 12))
        engine.step()
        if large.prefilled:
            break
    assert large.prefilled


def test_a_prompt_is_prefilled_in_pieces_while_rows_decode() -> None:
    engine = Engine(SchedulerLimits(max_num_seqs=4, prefill_tokens=16, cache_bytes=60_000, cost=cost))
    engine.scheduler.add(job_of(3, 100))
    engine.step()
    (batch,) = engine.scheduler.batches
    engine.scheduler.add(job_of(100, 5))
    decoded = len(batch.sequences[0].tokens)
    chunks = [engine.step() for _ in range(7)]
    assert chunks == [16] * 6 + [4]
    assert len(batch.sequences[0].tokens) == decoded + 7


def test_a_prompt_of_a_higher_priority_comes_before_the_rest_of_a_begun_one() -> None:
    engine = Engine(SchedulerLimits(max_num_seqs=4, prefill_tokens=16, cache_bytes=60_000, cost=cost, prefill_floor=1))
    long, equal, urgent = job_of(100, 5), job_of(20, 5), job_of(20, 5)
    long.priority = equal.priority = 200
    engine.scheduler.add(long)
    engine.step()
    for request in (equal, urgent):
        engine.scheduler.add(request)
    engine.step()
    engine.step()
    assert (urgent.prefilled, long.prefilled, equal.prefilled) == (20, 16 + 12, 0)
    while not equal.prefilled:
        engine.step()
    assert long.prefilled == 100


def test_a_flood_of_short_prompts_lets_rows_decode_in_between() -> None:
    """A forward of 16 tokens takes nearly as long as one of 64: 32 of them in one step are a long pause."""
    engine = Engine(SchedulerLimits(max_num_seqs=40, prefill_tokens=512, cache_bytes=10**6, cost=cost))
    engine.scheduler.add(job_of(3, 100))
    engine.step()
    for _ in range(32):
        engine.scheduler.add(job_of(16, 5))
    assert [engine.step() for _ in range(5)] == [8 * 16] * 4 + [0]


def test_prompts_that_cannot_be_cut_come_one_per_step() -> None:
    engine = Engine(SchedulerLimits(max_num_seqs=4, prefill_tokens=None, cache_bytes=60_000, cost=cost))
    for length in (30, 20, 10):
        engine.scheduler.add(job_of(length, 9))
    assert sorted(engine.step() for _ in range(4)) == [0, 10, 20, 30]


def test_long_and_short_rows_go_to_different_batches() -> None:
    scheduler = Scheduler(SchedulerLimits(8, 10**6, 10**6, cost))
    requests = [job_of(length, 2, context=10_000) for length in (5, 1500, 300, 1200, 9)]
    for request in requests:
        scheduler.add(request)
    scheduler.chunks()
    assert [[len(request.prompt) for request in batch.expected] for batch in scheduler.batches] == [
        [5, 9, 300],
        [1500, 1200],
    ]


def test_batches_are_bounded_in_number_and_in_how_unlike_their_rows_are() -> None:
    def batches(**shape: int) -> list[list[int]]:
        scheduler = Scheduler(SchedulerLimits(8, 10**6, 10**7, cost, **shape))
        for length in (5, 400, 700, 1500, 3000, 9000):
            scheduler.add(job_of(length, 2, context=10_000))
        scheduler.chunks()
        return [[len(request.prompt) for request in batch.expected] for batch in scheduler.batches]

    assert batches() == [[5, 400, 700], [1500, 3000], [9000]]
    assert batches(spread=2) == [[5, 400], [700], [1500, 3000], [9000]]
    assert batches(spread=2, batches=2) == [[5, 400, 1500, 3000, 9000], [700]]


@pytest.mark.parametrize("waits", [True, False])
def test_where_batches_are_free_nobody_is_moved_for_newcomers(waits: bool) -> None:
    engine = Engine(SchedulerLimits(32, 512, 10**7, cost, spread=2, batches=8, joint=True))
    sizes: dict[DecodeBatch, set[tuple[int, int]]] = {}
    for number in range(32):
        engine.scheduler.add(job_of(120 + number % 7, 90))
        if number == 0 or not waits:
            engine.step()
        for batch, size in engine.allocated.items():
            sizes.setdefault(batch, set()).add(size)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
        for batch, size in engine.allocated.items():
            sizes.setdefault(batch, set()).add(size)
    assert engine.scheduler.running_sequences == 32
    assert all(len(found) == 1 for found in sizes.values())
    assert len(sizes) <= (2 if waits else 7)
    assert sum(rows for ((rows, _),) in sizes.values()) <= 48


def test_room_for_those_who_wait_leaves_half_of_the_memory() -> None:
    scheduler = Scheduler(SchedulerLimits(32, 16, 20_000, cost, spread=2, batches=8, joint=True))
    for _ in range(32):
        scheduler.add(job_of(30, 30))
    scheduler.chunks()
    (batch,) = scheduler.batches
    assert batch.row_capacity == 0  # 32 rows would take all of it
    scheduler = Scheduler(SchedulerLimits(32, 16, 10**6, cost, spread=2, batches=8, joint=True))
    for _ in range(32):
        scheduler.add(job_of(30, 30))
    scheduler.chunks()
    (batch,) = scheduler.batches
    assert batch.row_capacity == 32


def test_an_open_prompt_is_billed_for_what_has_come_and_takes_no_row() -> None:
    engine = Engine(SchedulerLimits(1, 10**6, 10**5, cost))
    request = job_of(0, 5, is_open=True)
    engine.scheduler.add(request)
    engine.step()
    assert engine.scheduler.reserved_bytes == 0
    for _ in range(3):
        request.grow((1,) * 30, whole=False)
        assert engine.step() == (29 if request.prefilled == 29 else 30)
        columns = row_step(len(request.prompt))
        assert columns <= 1.25 * len(request.prompt) and engine.scheduler.reserved_bytes == cost(1, columns)
    engine.scheduler.add(job_of(10, 2))
    assert engine.step() == 10  # the only row is free
    request.grow(tuple(request.prompt), whole=True)
    engine.scheduler.add(job_of(300, 2))
    while not engine.idle:
        engine.step()
    assert engine.started[0] is request and engine.started.count(request) == 1


@pytest.mark.parametrize("paused", [1, 7])
def test_paused_prompts_keep_nobody_out(paused: int) -> None:
    """They fill the memory, and give it up, the idlest first, as others are admitted."""
    cache_bytes = cost(1, column_step(CONTEXT)) + cost(1, CONTEXT)
    engine = Engine(SchedulerLimits(4, 10**6, cache_bytes, cost))
    prompts = [job_of(0, 5, is_open=True) for _ in range(paused)]
    for request in prompts:
        engine.scheduler.add(request)
        request.grow((1,) * (CONTEXT - 50), whole=False)
        engine.step()
    assert engine.scheduler.reserved_bytes > cache_bytes / 3
    for _ in range(6):
        engine.scheduler.add(job_of(300, 20))
    while engine.scheduler.waiting or engine.scheduler.batches:
        engine.step()
    assert prompts[0].prefilled == 0 and len(engine.started) >= 6
    prompts[0].grow((1,) * 20, whole=False)
    engine.step()
    assert prompts[0].prefilled == 0  # what was given up is not prefilled again before the end is known
    for request in prompts:
        request.grow((1,) * (CONTEXT - 20), whole=True)
    while not engine.idle:
        engine.step()
    assert all(len(sequence.tokens) == 5 for request in prompts for sequence in request.sequences)


def test_a_batch_shrinks_when_it_is_much_too_large() -> None:
    engine = Engine(SchedulerLimits(8, 10**6, 10**6, cost))
    for sequence in (3, 3, 3, 3, 3, 100):
        engine.scheduler.add(job_of(5, sequence))
    engine.step()
    (batch,) = engine.scheduler.batches
    assert (len(batch.sequences), batch.row_capacity) == (6, 6)
    before = engine.scheduler.reserved_bytes
    for _ in range(3):
        engine.step()
    assert (len(batch.sequences), batch.row_capacity) == (1, 1)
    assert engine.scheduler.reserved_bytes < before


@pytest.mark.parametrize(
    ("rows", "step"), [(0, 0), (1, 1), (2, 2), (3, 3), (8, 8), (9, 10), (17, 20), (33, 40), (57, 64)]
)
def test_rows_grow_by_quarters_of_a_power_of_two(rows: int, step: int) -> None:
    assert row_step(rows) == step


def test_the_longest_sequence_is_exactly_what_fits() -> None:
    for cache_bytes in range(500, 60_000, 997):
        scheduler = Scheduler(SchedulerLimits(4, None, cache_bytes, cost))
        longest = longest_sequence(cost, cache_bytes, 10_000)
        assert longest == 0 or scheduler.fits_alone(1, longest, longest)
        assert not scheduler.fits_alone(1, longest + 1, longest + 1)


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, mlserver_torch_stream.engine.scheduling.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
