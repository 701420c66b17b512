"""The scheduler alone: invariants that hold through random arrivals, steps, failures, ends and cancellations.

`make test` tries 50 schedules. For 10,000: ``SCHEDULES=10000 pytest --hypothesis-profile random`` on this file.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduler.queue import PromptBudget, SchedulerLimits, fits_alone, longest_sequence
from tests.engine.schedule_model import CONTEXT, ModelledEngine, choice, expected, key_after, request_of

FULL = LayerGroup((0,), token_bytes=4)
SPEC = CacheSpec(4, (FULL,))


def limits_of(spec: CacheSpec = SPEC, *, pages: int = 200, **more: Any) -> SchedulerLimits:
    given = {"max_num_seqs": 8, "token_budget": 16, "pages": (pages,) * len(spec.groups), "cache_bytes": 10**9}
    return SchedulerLimits(**{**given, "prefix_bytes": 10**9, **more})


def engine_of(spec: CacheSpec = SPEC, drafts: Any = None, **more: Any) -> ModelledEngine:
    return ModelledEngine(limits_of(spec, **more), spec, drafts)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def forced_drafts(sequence: SequenceState, running: int) -> list[int]:
    """Drafts 40 right tokens, as if a constraint forced them, in two of three sequences."""
    if len(sequence.request.prompt) % 3 == 0:
        return []
    return expected([*sequence.request.prompt, *sequence.tokens], sequence.index, 40)


def some_drafts(sequence: SequenceState, running: int) -> list[int]:
    """Drafts up to three tokens; every fifth draft is wrong."""
    key = 0
    for token in [*sequence.request.prompt, *sequence.tokens]:
        key = key_after(key, token)
    drafts = []
    for step in range(key % 4):
        drafts.append(choice(key, sequence.index) + ((key >> 9) % 5 == step))
        key = key_after(key, drafts[-1])
    return drafts


Job = tuple[int, int, int, int, int, int]
GROUPS = [
    (FULL,),
    (LayerGroup((0,), window=9, token_bytes=4),),
    (FULL, LayerGroup((1,), window=5, token_bytes=12)),
    (FULL, LayerGroup((1,), chunk=6, token_bytes=2)),
    (LayerGroup((0,), window=3, token_bytes=4), LayerGroup((1,), chunk=8, token_bytes=4), FULL),
]


def engine_from(dice: random.Random, *, overlap: bool = False) -> ModelledEngine:
    """Returns an engine with memory for a few sequences, so that they are often preempted."""
    spec = CacheSpec(dice.choice([1, 2, 4, 16]), dice.choice(GROUPS), dice.choice([0, 0, 0, 40]))
    sequences, least = dice.randint(1, 7), spec.pages(dice.randint(60, CONTEXT)) + 1
    pages = tuple(least + dice.randint(0, least) for _ in spec.groups)
    everything = sum(count * spec.page_bytes(group) for group, count in enumerate(pages)) + sequences * spec.state_bytes
    limits = SchedulerLimits(
        max_num_seqs=sequences,
        token_budget=dice.choice([None, dice.randint(1, 8), dice.randint(8, 60)]),
        pages=pages,
        cache_bytes=dice.randint(everything * 2 // 3, everything),
        prefix_bytes=dice.choice([0, everything // 4, everything]),
        stages=dice.choice([1, 1, 2, 3]),
        whole_prompts=dice.random() < 0.25,
        prefill_floor=dice.choice([1, 8]),
        beside_budget=dice.choice([None, dice.randint(1, 8)]),
    )
    engine = ModelledEngine(limits, spec, dice.choice([None, None, some_drafts, forced_drafts]), overlap)
    if dice.random() < 0.5:
        budgets = [PromptBudget(dice.randint(1, 40), per_key, least) for per_key in (0.0, 0.1) for least in (1, 4)]
        budgets += [PromptBudget(dice.randint(0, 12), 0.1, 0), PromptBudget(dice.randint(1, 40), 0.0, 1, 0.5)]
        budgets += [PromptBudget(dice.randint(-9, 40), 0.1, least, 2.0, dice.randint(0, 9)) for least in (0, 4)]
        engine.prompt_budget = lambda: dice.choice([None, *budgets])
    return engine


def job_from(dice: random.Random) -> Job:
    """Returns random values: a shared text, its tokens, other tokens, max_tokens, n, and the priority."""
    n = dice.choice([1, 1, 1, 2, 3])
    tokens = dice.randint(1, 60 // n), dice.randint(0, 3), dice.randint(1, 50 // n)
    return (dice.randint(0, 2), *tokens, n, dice.choice([0, 1, 1, 2]))


def event_from(dice: random.Random) -> tuple[str, Any]:
    event = dice.choices(["request", "cancel", "fail", "nan", "steps"], [8, 1, 1, 1, 8])[0]
    return event, job_from(dice) if event == "request" else dice.randint(1, 12)


STOPS: list[tuple[str, ...]] = [(), ("abba",), ("aaab", "cb")]
TEXTS = [prompt_of(CONTEXT, seed) for seed in range(3)]


class Visitors:
    """Turns random events into what clients do to an engine."""

    def __init__(self, engine: ModelledEngine, *, stops: bool = False) -> None:
        """With ``stops``, two of three requests have stop strings."""
        self.engine = engine
        self.stops = STOPS if stops else [()]
        self.number = 0

    def happens(self, event: str, value: Any) -> None:
        getattr(self, event)(value)

    def request(self, job: Job) -> None:
        text, shared, own, tokens, n, priority = job
        self.number += 1
        prompt = [*TEXTS[text][:shared], *(2000 + self.number for _ in range(own))][: CONTEXT - 1]
        stop = self.stops[self.number % len(self.stops)]
        self.engine.add(request_of(prompt, tokens, n, priority=priority, stop=stop))

    def cancel(self, index: int) -> None:
        if self.engine.requests:
            self.engine.cancel(self.engine.requests[index % len(self.engine.requests)])

    def fail(self, culprit: int) -> None:
        self.engine.fail_next = culprit

    def nan(self, index: int) -> None:
        """The logits of a running sequence hold NaN: it ends, and no other sequence may use its keys."""
        running = [
            each for each in self.engine.scheduler.ledger._sequences if each.tokens and each not in self.engine.busy
        ]
        if running:
            self.engine.forget(running[index % len(running)])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()


@settings(max_examples=int(os.environ.get("SCHEDULES", "50")), deadline=None)
@given(seed=st.integers(0, 2**40), count=st.integers(0, 60), stops=st.booleans(), overlap=st.booleans())
@example(seed=468, count=41, stops=False, overlap=False)  # resumes; the prefix cache has all but the last token
@example(seed=663, count=53, stops=False, overlap=False)  # a chunk of a sequence that resumes, likewise
def test_whatever_comes_and_goes_every_sequence_gets_its_tokens(
    seed: int, count: int, stops: bool, overlap: bool
) -> None:
    """No page is lost or has two writers, a query sees the keys of its own tokens, and every request ends.

    Answers end at their stop strings, even if a step's text is made only when the next step is launched. The model of
    the forward checks each read and write (`schedule_model.py`), and counts references after each step.
    """
    dice = random.Random(seed)
    engine = engine_from(dice, overlap=overlap)
    visitors = Visitors(engine, stops=stops)
    for _ in range(count):
        visitors.happens(*event_from(dice))
    engine.fail_next = None
    engine.run()
    engine.check_end()


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), count=st.integers(2, 30), prompt=st.integers(1, 40), tokens=st.integers(1, 20))
def test_equal_requests_start_in_the_order_of_arrival(seed: int, count: int, prompt: int, tokens: int) -> None:
    engine = engine_from(random.Random(seed))
    requests = [request_of(prompt_of(prompt, number), tokens) for number in range(count)]
    for request in requests:
        assert engine.add(request)
    while not engine.idle:
        engine.step()
    assert list(engine.started) == requests


def test_a_step_without_work_has_an_empty_plan() -> None:
    assert not engine_of().scheduler.schedule()


# --- the order of a step ---


def computed(engine: ModelledEngine) -> int:
    before = engine.prefilled
    engine.step()
    return engine.prefilled - before


def test_a_running_sequence_gets_a_token_in_each_step_of_a_long_prompt() -> None:
    engine = engine_of()
    running = request_of(prompt_of(3), 90)
    engine.add(running)
    engine.step()
    engine.add(request_of(prompt_of(100, 1), 5))
    decoded = len(running.sequences[0].tokens)
    assert [computed(engine) for _ in range(7)] == [16] * 6 + [4]
    assert len(running.sequences[0].tokens) == decoded + 7


def test_a_prompt_of_a_higher_priority_comes_before_the_rest_of_a_begun_one() -> None:
    engine = engine_of()
    long, equal = (request_of(prompt_of(length, length), 5, priority=2) for length in (100, 20))
    urgent = request_of(prompt_of(20, 3), 5)
    engine.add(long)
    engine.step()
    engine.add(equal)
    engine.add(urgent)
    plans = [engine.step() for _ in range(3)]
    found = [[part.sequence.request for part in plan.parts] for plan in plans]
    assert found == [[urgent], [urgent, long], [urgent, long]]
    assert engine.scheduler.waiting.has_before(3)  # the equal one waits for the rest of the long one
    engine.run()


def test_a_flood_of_short_chunks_is_bounded_where_each_is_a_forward() -> None:
    engine = engine_of(token_budget=64, prefill_floor=16, max_num_seqs=40)
    for number in range(6):
        engine.add(request_of(prompt_of(2, number), 5))
    assert [computed(engine) for _ in range(3)] == [8, 4, 0]


def test_prompts_take_less_of_a_step_in_which_sequences_decode() -> None:
    engine = engine_of(token_budget=64, beside_budget=8, pages=400)
    engine.add(request_of(prompt_of(100, 1), 6))
    assert [computed(engine) for _ in range(2)] == [64, 36]
    engine.add(request_of(prompt_of(100, 2), 6))
    found = [computed(engine) for _ in range(6)]
    assert found[:5] == [8] * 5
    assert found[5] == 60  # the other one has ended


def test_the_prompts_of_a_step_keep_to_the_budget_that_it_is_given_and_drafts_do_not() -> None:
    engine = engine_of(token_budget=64, pages=400, drafts=lambda sequence, running: [1, 2, 3])
    engine.prompt_budget = lambda: PromptBudget(4)
    engine.add(request_of(prompt_of(10, 1), 30))
    assert [computed(engine) for _ in range(3)] == [4, 4, 2]
    engine.add(request_of(prompt_of(10, 2), 30))
    plan = engine.step()
    assert plan.prompt_tokens == 4 and [len(part.drafts) for part in plan.parts] == [3, 0]
    engine.prompt_budget = lambda: PromptBudget(1000)
    assert computed(engine) == 6


def test_drafts_and_prompts_of_a_step_share_its_time() -> None:
    engine = engine_of(token_budget=64, pages=400, drafts=lambda sequence, running: [1, 2, 3])
    for number in range(4):
        engine.add(request_of(prompt_of(4, number), 40))
    engine.step()
    engine.prompt_budget = lambda: PromptBudget(20, 0.0, 4, per_draft=1.0)
    alone = engine.step()
    assert sum(len(part.drafts) for part in alone.parts) == 12
    engine.add(request_of(prompt_of(100, 9), 40))
    beside = engine.step()
    assert sum(len(part.drafts) for part in beside.parts) == 12 and beside.prompt_tokens == 8
    engine.prompt_budget = lambda: PromptBudget(10, 0.0, 4, per_draft=1.0)
    beside = engine.step()
    assert sum(len(part.drafts) for part in beside.parts) == 6 and beside.prompt_tokens == 4


def test_drafts_leave_time_for_a_page_of_a_prompt_with_many_keys_before_it() -> None:
    """Each key before a prompt token adds a tenth of the token's time."""
    drafts: list[int] = []
    engine = engine_of(token_budget=64, pages=400, drafts=lambda sequence, running: drafts)
    engine.add(request_of(prompt_of(4), 60))
    engine.step()
    engine.add(request_of(prompt_of(80, 1), 5))
    engine.step()
    drafts += [1] * 50
    budget = PromptBudget(40.0, 0.1, 4, per_draft=1.0)
    engine.prompt_budget = lambda: budget
    plan = engine.step()
    (decoding, prompt) = plan.parts
    assert (prompt.start, prompt.count) == (64, 4)
    assert len(decoding.drafts) == int(40 - budget.cost_of(64, 4)) == 9


def test_a_prompt_that_there_is_no_place_for_takes_no_drafts_from_the_running_sequences() -> None:
    engine = engine_of(pages=400, max_num_seqs=2, drafts=lambda sequence, running: [1, 2, 3])
    engine.prompt_budget = lambda: PromptBudget(5, 0.0, 4, per_draft=1.0)
    for number in range(3):
        engine.add(request_of(prompt_of(4, number), 60))
    while engine.scheduler.running_sequences < 2:
        engine.step()
    assert len(engine.scheduler.waiting) == 1
    assert [len(part.drafts) for part in engine.step().parts] == [3, 3]


def test_the_drafts_of_all_sequences_together_keep_to_their_number() -> None:
    engine = engine_of(token_budget=64, pages=400, drafts=lambda sequence, running: [1] * 6)
    for number in range(3):
        engine.add(request_of(prompt_of(4, number), 90))
    engine.step()
    for most, drafts in ((math.inf, [6, 6, 6]), (9.5, [6, 3, 0]), (0.5, [0, 0, 0])):
        engine.prompt_budget = partial(PromptBudget, math.inf, most_drafts=most)
        assert [len(part.drafts) for part in engine.step().parts] == drafts


def test_a_budget_without_a_least_computes_no_prompt_that_does_not_fit() -> None:
    engine = engine_of(token_budget=64, pages=400)
    engine.add(request_of(prompt_of(4), 90))
    engine.step()
    engine.add(request_of(prompt_of(100, 1), 5))
    costs = iter((8.0, 3.0, -5.0, 0.0, 9.0))
    engine.prompt_budget = lambda: PromptBudget(next(costs), 0.0, 0)
    assert [computed(engine) for _ in range(5)] == [8, 0, 0, 0, 8]


def test_a_chunk_that_is_a_forward_of_its_own_has_as_many_tokens_as_it_costs() -> None:
    engine = engine_of(token_budget=64, prefill_floor=16, pages=400)
    engine.add(request_of(prompt_of(4), 90))
    engine.step()
    engine.prompt_budget = lambda: PromptBudget(8, 0.0, 4)
    engine.add(request_of(prompt_of(40, 1), 5))
    assert [computed(engine) for _ in range(3)] == [16, 16, 8]


def test_no_prompt_begins_with_the_few_tokens_that_another_leaves() -> None:
    """The chunks of the first prompt end at pages of four tokens, so each step has a few tokens left."""
    engine = engine_of(token_budget=18, pages=400)
    for number in range(2):
        engine.add(request_of(prompt_of(41, number), 5))
    plans = [engine.step() for _ in range(5)]
    assert [[part.count for part in plan.parts if part.prefills] for plan in plans[:4]] == [[16], [16], [9, 8], [16]]
    engine = engine_of(token_budget=64, pages=400)
    engine.prompt_budget = lambda: PromptBudget(18, 0.01)
    for number in range(2):
        engine.add(request_of(prompt_of(60, number), 5))
    while not engine.idle:
        chunks = [part for part in engine.step().parts if part.prefills]
        assert all(part.count >= 4 or part.samples for part in chunks)


def test_prompts_that_cannot_be_cut_come_one_per_step() -> None:
    engine = engine_of(whole_prompts=True)
    for length in (30, 20, 10):
        engine.add(request_of(prompt_of(length, length), 9))
    assert sorted(computed(engine) for _ in range(4)) == [0, 10, 20, 30]
    engine.add(request_of(prompt_of(30, 30), 9))
    assert computed(engine) == 30  # nor does it go on from what is known


def test_a_request_that_waits_for_room_is_not_overtaken_for_ever() -> None:
    """Small requests keep arriving and always fit; the large one must still be admitted."""
    engine = engine_of(pages=40)
    large = request_of(prompt_of(100, 1), 9)
    for step in range(400):
        if step % 3 == 0:
            engine.add(request_of(prompt_of(12, step), 20))
        if step == 20:
            engine.add(large)
        engine.step()
    assert large.finished


def test_each_stage_of_a_pipeline_gets_its_share_of_the_sequences_that_decode() -> None:
    engine = engine_of(stages=3, max_num_seqs=7, token_budget=100)
    for number in range(7):
        engine.add(request_of(prompt_of(4, number), 30))
    for _ in range(12):
        engine.step()
    engine.step()
    busy = engine.busy
    plan = engine.scheduler.schedule(busy)
    assert len(plan.parts) <= 3
    assert len(busy) + len(plan.parts) == 7
    assert not busy & {part.sequence for part in plan.parts}


# --- what is shared ---


def test_a_shared_beginning_of_prompts_that_arrive_together_is_computed_and_held_once() -> None:
    engine = engine_of(max_num_seqs=32, token_budget=64, pages=400)
    beginning = prompt_of(80)
    requests = [request_of([*beginning, 5000 + number], 4) for number in range(32)]
    for request in requests:
        engine.add(request)
    held = 0
    while any(not request.sequences[0].tokens for request in requests):
        engine.step()
        held = max(held, engine.scheduler.ledger.used_bytes)
    assert engine.prefilled == 80 + 32
    assert held <= (80 // 4 + 2 * 32) * SPEC.page_bytes(0)
    assert sorted(request.cached_tokens for request in requests) == [0] + [80] * 31
    assert engine.scheduler.hit_tokens == 31 * 80
    engine.run()
    engine.check_end()


def test_a_page_is_found_while_the_batch_that_writes_it_is_in_flight() -> None:
    engine = engine_of(stages=2)
    for number in range(2):
        engine.add(request_of([*prompt_of(32), 5000 + number], 4))
    engine.run()
    engine.check_end()
    assert engine.prefilled == 34


def test_the_same_prompt_again_leaves_one_token_for_the_logits() -> None:
    engine = engine_of()
    for cached in (0, 28):
        request = request_of(prompt_of(32), 4)
        engine.add(request)
        engine.run()
        assert request.cached_tokens == cached


def test_the_next_turn_of_a_conversation_begins_with_the_last_answer() -> None:
    engine = engine_of()
    first = request_of(prompt_of(10), 11)
    engine.add(first)
    engine.run()
    second = request_of([*first.prompt, *first.sequences[0].tokens, 1, 2, 3], 4)
    engine.add(second)
    engine.run()
    assert second.cached_tokens == 20  # of the 20 that were computed: the last token was not
    engine.check_end()


def test_nothing_is_kept_of_ended_sequences_without_bytes_for_it() -> None:
    engine = engine_of(prefix_bytes=0)
    for _ in range(2):
        engine.add(request_of(prompt_of(32), 4))
        engine.run()
    assert engine.scheduler.hit_tokens == 0
    assert engine.scheduler.ledger.cached_bytes == 0


def test_keys_that_may_hold_nan_are_not_found() -> None:
    engine = engine_of()
    engine.add(request_of(prompt_of(32), 20))
    for _ in range(6):
        engine.step()
    engine.forget(engine.requests[0].sequences[0])
    again = request_of(prompt_of(32), 20)
    engine.add(again)
    engine.run()
    assert again.cached_tokens == 0


def test_sequences_of_one_request_share_their_prompt_and_copy_its_last_page() -> None:
    engine = engine_of()
    engine.add(request_of(prompt_of(14), 20, n=4))
    engine.step()
    assert engine.scheduler.ledger.used_bytes == 4 * SPEC.page_bytes(0)
    plan = engine.step()
    assert len(plan.batch.copies) == 3
    assert engine.scheduler.ledger.used_bytes == (3 + 4) * SPEC.page_bytes(0)
    engine.run()
    engine.check_end()


def test_states_are_copied_for_each_sequence_of_a_request_and_never_found_by_others() -> None:
    engine = engine_of(CacheSpec(4, (FULL,), state_bytes=100))
    for _ in range(2):
        engine.add(request_of(prompt_of(14), 20, n=3))
    engine.step()
    copies = engine.step().batch.state_copies
    assert len({target for _, target in copies}) == len(copies) == 2
    engine.run()
    engine.check_end()
    assert engine.scheduler.hit_tokens == 0


def test_pages_behind_a_window_are_given_back_and_a_prefix_needs_only_those_in_it() -> None:
    spec = CacheSpec(4, (FULL, LayerGroup((1,), window=9, token_bytes=100)))
    engine = engine_of(spec)
    engine.add(request_of(prompt_of(100), 10))
    for _ in range(10):
        plan = engine.step()
    (table, windowed) = plan.batch.sequences[0].tables
    assert min(table) >= 0
    assert list(windowed).count(-1) == len(windowed) - 3
    engine.run()
    again = request_of(prompt_of(100), 10)
    engine.add(again)
    engine.run()
    assert again.cached_tokens == 96
    engine.check_end()


# --- too little memory ---


def test_the_last_admitted_of_the_lowest_priority_is_preempted_and_gets_the_same_tokens() -> None:
    engine = engine_of(pages=16, token_budget=64, prefix_bytes=0)
    first, late, important = (request_of(prompt_of(15, seed), 20, priority=2 - seed // 2) for seed in range(3))
    for request in (first, late, important):
        engine.add(request)
    while not engine.scheduler.preemptions:
        engine.step()
    (preempted,) = [each for each in engine.scheduler.admitted if each.restarts]
    assert preempted.sequence.request is late
    engine.run()
    engine.check_end()


def test_a_sequence_that_fills_the_cache_goes_on_after_it_has_lost_its_pages() -> None:
    engine = engine_of(pages=24, prefix_bytes=0)
    request = request_of(prompt_of(60), 36)
    engine.add(request)
    while len(request.sequences[0].tokens) < 35:
        engine.step()
    engine.scheduler.restarts.recompute(request.sequences)
    engine.run()
    engine.check_end()


def test_a_fresh_prompt_waits_for_the_pages_of_all_of_it_and_for_preempted_ones() -> None:
    engine = engine_of(pages=16, token_budget=8, prefix_bytes=0)
    first, second = request_of(prompt_of(30), 20), request_of(prompt_of(36, 1), 4)
    engine.add(first)
    engine.step()
    engine.add(second)
    while not first.finished:
        engine.step()
        assert engine.scheduler.prefilling_requests + engine.scheduler.running_sequences <= 1
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_preemptions_are_rare_where_memory_is_full() -> None:
    dice = random.Random(1)
    engine = engine_of(CacheSpec(16, (FULL,)), pages=80, token_budget=64, prefix_bytes=0, max_num_seqs=32)
    for number in range(100):
        engine.add(request_of(prompt_of(dice.randint(4, 60), number), dice.randint(2, 50)))
    engine.run()
    engine.check_end()
    assert engine.scheduler.preemptions <= 2


def test_the_longest_sequence_is_exactly_what_fits() -> None:
    spec = CacheSpec(4, (FULL, LayerGroup((1,), window=9, token_bytes=12)), state_bytes=30)
    for cache_bytes in range(0, 3_000, 97):
        limits = limits_of(spec, cache_bytes=cache_bytes)
        longest = longest_sequence(spec, limits, 700)
        assert longest == 0 or fits_alone(spec, limits, 1, longest, longest)
        assert not fits_alone(spec, limits, 1, longest + 1, longest + 1)


def test_what_can_never_run_is_refused_with_a_reason() -> None:
    scheduler = engine_of(pages=24).scheduler
    assert scheduler.refusal(1, 10, 96) is None
    assert "1 sequences of 97 tokens can never run" in (scheduler.refusal(1, 10, 97) or "")
    assert "9 sequences of 4 tokens can never run" in (scheduler.refusal(9, 1, 4) or "")
    assert scheduler.refusal(8, 64, 66) is None  # they share their prompt
    assert scheduler.refusal(8, 1, 16) is not None


def test_a_request_for_no_token_is_admitted_if_its_prompt_fits() -> None:
    """Its sequences share all pages. It would otherwise wait for ever, and all later requests behind it."""
    scheduler = engine_of(pages=3).scheduler
    request = request_of(prompt_of(12), 0, n=3)
    assert scheduler.refusal(3, 12, 12) is None
    scheduler.add(request)
    assert scheduler.schedule().prompt_tokens == 12


# --- failures and drafts ---


def test_sequences_that_share_pages_of_a_failed_forward_are_computed_again() -> None:
    engine = engine_of(token_budget=40)
    for number in range(3):
        engine.add(request_of([*prompt_of(32), 5000 + number], 4))
    plan = engine.scheduler.schedule()
    writer, *sharing = [part.sequence for part in plan.parts]
    assert len(sharing) == 2
    assert engine.scheduler.restarts.isolate(plan.parts) == sharing
    assert not any(engine.scheduler.advance(part, part.count) for part in plan.parts[1:])
    assert engine.scheduler.release([writer], forget=True) == []
    again = engine.scheduler.schedule()
    assert [part.start for part in again.parts] == [0, 32]
    assert engine.scheduler.restarts.recompute([again.parts[0].sequence]) == sharing
    (first, second) = [part.sequence for part in engine.scheduler.schedule().parts]
    assert engine.scheduler.release([first]) == [second]


def test_sequences_whose_copies_were_in_a_failed_batch_are_computed_again_without_them() -> None:
    """The source page of a copy may have been reassigned by then, and source states may have advanced."""
    for spec, prompt in ((SPEC, 14), (CacheSpec(4, (FULL,), state_bytes=100), 16)):
        engine = engine_of(spec)
        engine.add(request_of(prompt_of(prompt), 20, n=3))
        engine.step()
        plan = engine.scheduler.schedule()
        targets = {copy[-1] for copy in plan.batch.state_copies or plan.batch.copies}
        parts = zip(plan.parts, plan.batch.sequences, strict=True)
        copied = [part.sequence for part, each in parts if targets & {each.state_slot, each.tables[0][-1]}]
        assert len(copied) == len(targets) == 2
        assert engine.scheduler.restarts.isolate(plan.parts) == copied
        assert [engine.scheduler.ledger.is_void(part) for part in plan.parts] == [
            part.sequence in copied for part in plan.parts
        ]


def test_drafts_come_before_prompts_but_leave_them_half_of_the_tokens_of_a_step() -> None:
    engine = engine_of(
        token_budget=16,
        drafts=lambda sequence, running: expected([*sequence.request.prompt, *sequence.tokens], sequence.index, 6),
    )
    for number in range(2):
        engine.add(request_of(prompt_of(4, number), 90))
    engine.step()
    alone = engine.step()
    assert [len(part.drafts) for part in alone.parts] == [6, 6]
    engine.add(request_of(prompt_of(28, 2), 2))
    beside = [engine.step() for _ in range(4)]
    assert [plan.prompt_tokens for plan in beside] == [8, 8, 8, 4]
    assert [[len(part.drafts) for part in plan.parts] for plan in beside] == [[6, 2, 0]] * 4
    engine.run()
    engine.check_end()


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, mlserver_torch_stream.engine.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
