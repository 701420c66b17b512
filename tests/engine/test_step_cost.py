"""The cost of a step is learnt from measured steps, despite their order, noise and pauses of the machine."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.scheduler.queue import PromptBudget, SchedulerLimits
from mlserver_torch_stream.engine.scheduler.scheduler import Scheduler
from mlserver_torch_stream.engine.step.step_cost import StepCost
from tests.engine.schedule_model import request_of

SECONDS = st.floats(0, 1e6)
STEPS = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 256), SECONDS), max_size=60)


def fitting(cost: StepCost, target: float, rows: int) -> float:
    return cost.budget(target, rows).cost


def learn(cost: StepCost, base: float, per_prompt: float, per_row: float, noise: float = 0.0, seed: int = 1) -> None:
    """Records steps with and without prompts, whose duration is linear except for noise."""
    dice = random.Random(seed)
    for step in range(200):
        prompt, rows = (0, 16, 0, 48, 96, 128)[step % 6], dice.randint(1, 9)
        seconds = base + per_prompt * prompt + per_row * rows
        cost.note(prompt, rows, seconds * dice.uniform(1 - noise, 1 + noise))


def test_the_time_of_rows_is_a_line_through_the_past() -> None:
    cost = StepCost()
    assert (cost.of(3), cost.per_row) == (0.0, 0.0)
    for rows in (1, 5, 2, 9, 1) * 20:
        cost.note(0, rows, 0.010 + 0.002 * rows)
    assert cost.of(20) == pytest.approx(0.050, rel=0.03)
    assert cost.per_row == pytest.approx(0.002, rel=0.05)


def test_steps_of_one_size_do_not_make_a_further_row_free() -> None:
    cost, dice = StepCost(), random.Random(1)
    for step in range(300):
        cost.note(0, 4 + (step % 50 == 0), 0.01 * dice.uniform(0.5, 2))
        assert 0.01 / 4 / 40 < cost.per_row < 0.01
    assert 0.005 < cost.of(4) < 0.02


@given(st.floats(0.001, 0.2), st.floats(1e-4, 0.05), st.floats(1e-4, 0.01), st.integers(0, 99))
def test_noisy_linear_times_are_fitted(base: float, per_prompt: float, per_row: float, seed: int) -> None:
    cost = StepCost()
    learn(cost, base, per_prompt, per_row, 0.05, seed)
    for tokens in (16, 64, 128, 200):
        target = base + 4 * per_row + per_prompt * tokens
        tokens = fitting(cost, target, 4)
        seconds = base + 4 * per_row + per_prompt * tokens
        aim = max(target, 1.25 * (base + 4 * per_row))
        assert seconds < 1.2 * aim
        assert seconds > aim / 1.2 or tokens > 200  # twice what was measured


@given(st.integers(1, 40))
def test_a_paused_machine_does_not_ruin_what_fits(steps: int) -> None:
    """A step of one minute, however late it comes, reduces the number of prompt tokens by at most a third."""
    cost = StepCost()
    learn(cost, 0.05, 0.005, 0.002)
    for step in range(steps):
        cost.note((0, 64)[step % 2], 4, 0.058 + (0, 0.32)[step % 2])
    before = fitting(cost, 0.4, 4)
    cost.note(64, 4, 60.0)
    cost.note(0, 4, 60.0)
    assert before / 1.5 < fitting(cost, 0.4, 4) <= before


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_old_speeds_are_forgotten(factor: float) -> None:
    cost = StepCost()
    learn(cost, 0.05, 0.005, 0.002)
    learn(cost, 0.05 * factor, 0.005 * factor, 0.002 * factor)
    assert cost.of(4, 64) == pytest.approx(factor * 0.378, rel=0.1)


def test_an_hour_of_decoding_does_not_forget_the_cost_of_prompts() -> None:
    cost = StepCost()
    learn(cost, 0.05, 0.005, 0.002)
    before = fitting(cost, 0.4, 4)
    for _ in range(10_000):
        cost.note(0, 4, 0.058)
    assert fitting(cost, 0.4, 4) == pytest.approx(before, rel=0.05)


@given(STEPS, st.integers(0, 256), st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6))
def test_any_times_give_a_number_that_grows_with_the_target(
    steps: list[tuple[int, int, float]], rows: int, targets: list[float]
) -> None:
    cost = StepCost()
    for prompt, decoding, seconds in steps:
        if prompt or decoding:
            cost.note(prompt, decoding, seconds)
    found = [fitting(cost, target, rows) for target in sorted(targets)]
    assert found == sorted(found) and found[0] >= 1
    largest = max((prompt for prompt, _, _ in steps), default=0)
    assert found[-1] <= max(1, 2.25 * largest + 1e-6)
    assert math.isfinite(cost.of(rows, 64)) and cost.of(rows, 64) >= 0 and cost.per_row >= 0


def test_what_fits_beside_decoding_that_takes_all_the_time_is_a_quarter_of_it() -> None:
    cost = StepCost()
    learn(cost, 0.05, 0.001, 0.002)
    assert fitting(cost, 0.01, 4) == pytest.approx(0.058 / 4 / 0.001, rel=0.2)


def test_prompts_that_wait_for_long_get_as_much_time_as_decoding() -> None:
    cost = StepCost()
    learn(cost, 0.05, 0.001, 0.002)
    found = [cost.budget(0.01, 4, waited=waited).cost for waited in (0.0, 10.0, 30.0, 1e6)]
    assert found[1] == pytest.approx(2 * found[0], rel=0.2)
    assert found[2] == found[3] == pytest.approx(0.058 / 0.001, rel=0.2)


def test_time_that_has_passed_before_a_step_leaves_its_prompts_the_rest_or_nothing() -> None:
    cost = StepCost()
    learn(cost, 0.05, 0.001, 0.002)
    whole, rest, none = (cost.budget(0.2, 4, 16, spent=spent) for spent in (0.0, 0.1, 0.19))
    assert (whole.least, rest.least, none.least) == (16, 0, 0)
    assert whole.cost == pytest.approx(142, rel=0.1) and rest.cost == pytest.approx(42, rel=0.2) and none.cost < 16
    assert cost.budget(0.06, 4, 16, spent=0.05) == cost.budget(0.06, 4, 16)  # decoding and a page take longer


def test_time_that_has_passed_keeps_no_prompt_out_whose_next_page_takes_longer_than_the_target() -> None:
    cost, dice = StepCost(), random.Random(1)
    for _ in range(100):
        tokens, context = dice.choice([16, 64, 128]), dice.uniform(0, 2000)
        cost.note(0, 4, 0.05)
        cost.note(tokens, 4, 0.05 + tokens * (0.001 + 1e-6 * context), tokens * context)
    late = [cost.budget(0.2, 4, 16, spent=0.19, start=start).least for start in (0, 2000, 20_000)]
    assert late == [0, 0, 16]


def test_drafts_cost_what_a_row_takes_in_prompt_tokens() -> None:
    cost = StepCost()
    learn(cost, 0.05, 0.001, 0.002)
    assert cost.budget(0.2, 4).per_draft == pytest.approx(2.0, rel=0.2)


def test_sizes_grow_step_by_step_to_the_target() -> None:
    """The cost is not linear: up to some number of tokens, a step takes the time in which the weights are read."""
    cost, sizes = StepCost(), [16]
    while len(sizes) < 40:
        cost.note(0, 4, 0.100)
        cost.note(sizes[-1], 4, max(0.100, 0.005 * sizes[-1]) + 0.02)
        sizes.append(int(cost.budget(0.5, 4, least=16).cost))
    assert all(later <= 2.25 * earlier for earlier, later in pairwise(sizes))
    assert max(sizes) * 0.005 + 0.02 <= 1.25 * 0.5
    assert sizes[-1] == pytest.approx(0.48 / 0.005, rel=0.1)


def test_steps_of_a_page_grow_although_each_page_has_more_keys_before_it() -> None:
    cost, start = StepCost(), 0
    for _ in range(20):
        cost.note(0, 4, 0.100)
        cost.note(16, 4, 0.100 + 16 * (0.001 + 1e-6 * start), 16 * (start + 8))
        start += 16
    budget = cost.budget(0.5, 4, least=16)
    assert 32 <= budget.fitting(budget.cost, start) < 48


def test_the_share_of_keys_in_the_time_of_a_prompt_token_is_learnt() -> None:
    """With 1,000 keys in the cache, a prompt token takes twice as long; the machine's speed changes during the test."""
    cost, dice = StepCost(), random.Random(1)
    for step in range(300):
        tokens, context = dice.choice([16, 64, 128]), dice.uniform(0, 2000)
        speed = dice.uniform(0.9, 1.1) * (3 if 100 < step < 200 else 1)
        cost.note(tokens, 4, speed * tokens * (0.001 + 1e-6 * context), tokens * context)
    budget = cost.budget(0.2, 4)
    assert budget.per_key == pytest.approx(0.001, rel=0.3)
    assert budget.fitting(budget.cost, 0) == pytest.approx(190, rel=0.2)
    assert budget.fitting(budget.cost, 2000) == pytest.approx(65, rel=0.2)


def test_time_that_small_steps_save_is_not_taken_for_that_of_keys() -> None:
    """While memory limits a step, its first prompt tokens add little: the times are those of 3 billion parameters."""
    cost = StepCost()
    for prompt, rows, seconds, keys in ((128, 0, 0.77, 64), (0, 1, 0.09, 0), (16, 1, 0.122, 8), (16, 1, 0.122, 24)):
        cost.note(prompt, rows, seconds, prompt * keys)
    assert cost.per_key < 0.0005
    assert cost.of(1, 32, 32 * 48) == pytest.approx(0.215, rel=0.1)


def test_a_slow_first_step_of_decoding_is_forgotten() -> None:
    """Beside that step, the next prompt seems to take less than no time."""
    cost = StepCost()
    for prompt, rows, seconds in ((512, 0, 2.0), (0, 1, 1.5), (16, 1, 0.2)):
        cost.note(prompt, rows, seconds, prompt * prompt / 2)
    for _ in range(90):
        cost.note(0, 1, 0.05)
        cost.note(64, 1, 0.05 + 64 * 0.004, 64 * 32)
    budget = cost.budget(0.25, 1)
    assert budget.fitting(budget.cost, 0) == pytest.approx(50, rel=0.3)


def test_a_slow_spell_of_decoding_does_not_lengthen_the_steps_of_the_prompts_that_follow_it() -> None:
    """While prompts keep coming, no step without prompts shows that decoding is ten times as fast again."""
    cost, times = StepCost(), list[float]()
    learn(cost, 0.05, 0.004, 0.002)
    for _ in range(100):
        cost.note(0, 4, 0.58)
    for _ in range(60):
        tokens = int(cost.budget(0.25, 4, 16, waited=30.0).cost)
        times.append(0.058 + 0.004 * tokens)
        cost.note(tokens, 4, times[-1])
    assert max(times) <= 1.25 * 0.25 < 0.58
    assert times[-1] == pytest.approx(0.25, rel=0.1)


@given(
    st.floats(0.002, 0.4),
    st.floats(1e-4, 0.02),
    st.floats(0.05, 1.0),
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 120), st.integers(0, 40)), max_size=4),
)
def test_steps_keep_to_the_target_again_after_any_changes_of_speed(
    decoding: float, per_token: float, target: float, spells: list[tuple[float, int, int]]
) -> None:
    """Each spell has steps without prompts and then steps with prompts. At its end, prompts keep coming."""
    cost, tokens, times = StepCost(), 16, list[float]()
    for speed, alone, beside in [(1.0, 5, 5), *spells, (1.0, 0, 100)]:
        for _ in range(alone):
            cost.note(0, 4, speed * decoding)
        times = []
        for _ in range(beside):
            tokens = min(4096, int(cost.budget(target, 4, 16).cost))
            times.append(speed * (decoding + per_token * tokens))
            cost.note(tokens, 4, times[-1])
    page = decoding + 16 * per_token
    assert max(times[50:]) <= 1.25 * max(target, 2 * decoding, 1.4 * page)
    assert sum(times[50:]) / 50 >= 0.6 * min(target, decoding + 4096 * per_token) or tokens == 16


@given(STEPS)
def test_any_times_keep_the_share_of_keys_within_what_a_prompt_token_takes(steps: list[tuple[int, int, float]]) -> None:
    cost = StepCost()
    for prompt, decoding, seconds in steps:
        if prompt or decoding:
            cost.note(prompt, decoding, seconds, prompt * prompt / 2)
    sizes = [prompt / 2 for prompt, _, _ in steps if prompt]
    assert 0 <= cost.per_key * min(sizes, default=1.0) <= 3 + 1e-6


@given(st.floats(0.5, 1e4), st.floats(0, 0.1), st.integers(0, 10_000))
def test_the_tokens_that_fit_a_budget_are_the_most_that_cost_no_more(cost: float, per_key: float, start: int) -> None:
    budget = PromptBudget(cost, per_key)
    tokens = budget.fitting(cost, start)
    assert budget.cost_of(start, tokens) <= cost * (1 + 1e-9) < budget.cost_of(start, tokens + 1) * (1 + 1e-6)


def test_steps_that_are_hard_to_predict_get_fewer_prompt_tokens() -> None:
    budgets = []
    for noise in (0.0, 0.05, 0.5):
        cost = StepCost()
        learn(cost, 0.05, 0.005, 0.002, noise)
        budgets.append(fitting(cost, 0.4, 4))
    assert budgets[0] == pytest.approx(budgets[1], rel=0.1) and budgets[2] < 0.8 * budgets[0]


# Seconds of a step, of a prompt token, of a row, and of a prompt token for each 1,000 keys before it: what two cores
# need for 135 million parameters (Zen 4; Zen 3, which has AVX2 alone) and for 1.1 billion.
SHAPES = {
    "135M": (0.012, 0.00045, 0.0015, 0.00014),
    "135M on AVX2": (0.012, 0.0013, 0.0015, 0.00115),
    "1.1B": (0.09, 0.0042, 0.009, 0.0008),
    "8B": (0.5, 0.035, 0.045, 0.004),
}


def test_a_prompt_beside_sixteen_slow_streams_is_computed_sooner_because_it_waits() -> None:
    """Decoding alone takes longer than the target. The real scheduler plans the steps; their durations are computed."""
    base, per_prompt, per_row, _ = SHAPES["8B"]

    def first_token(*, ages: bool) -> float:
        cost, spec, now = StepCost(), CacheSpec(16, (LayerGroup((0,), token_bytes=4),)), 0.0
        scheduler = Scheduler(SchedulerLimits(32, 512, (2000,), 10**12), spec)
        *streams, late = [request_of(range(size), 10**6, context=10**7) for size in (*range(1, 17), 2000)]
        for request in streams:
            scheduler.add(request)
        for step in range(1000):
            if step == 20:
                scheduler.add(late)
                now = 0.0
            rows = scheduler.running_sequences
            plan = scheduler.schedule((), cost.budget(0.5, rows, 16, waited=now if ages else 0.0) if rows else None)
            decoding = sum(not part.prefills for part in plan.parts)
            seconds = base + per_row * decoding + per_prompt * plan.prompt_tokens
            cost.note(plan.prompt_tokens, decoding, seconds)
            now += seconds
            for part in plan.parts:
                scheduler.advance(part, part.count)
                part.sequence.tokens += [1] * len(part.samples)
            if late.sequences[0].tokens:
                return now
        raise AssertionError("the prompt starves")

    assert first_token(ages=True) < 0.8 * first_token(ages=False)


@pytest.mark.parametrize(
    ("shape", "target"),
    [("135M", 0.1), ("135M on AVX2", 0.1), ("135M on AVX2", 0.25), ("1.1B", 0.25), ("1.1B", 0.5), ("1.1B", 1.0)],
)
def test_no_step_beside_a_stream_takes_much_longer_than_the_target(shape: str, target: float) -> None:
    """Sixteen prompts arrive while a stream runs. The real scheduler plans the steps; their durations are computed."""
    base, per_prompt, per_row, per_key = SHAPES[shape]
    dice, cost = random.Random(1), StepCost()
    scheduler = Scheduler(SchedulerLimits(32, 512, (2000,), 10**12), CacheSpec(16, (LayerGroup((0,), token_bytes=4),)))
    requests = [request_of(range(64), 10**6, context=10**7)]
    scheduler.add(requests[0])
    times = []
    for step in range(800):
        if step == 20:
            sizes = [round(math.exp(dice.uniform(math.log(128), math.log(2000)))) for _ in range(16)]
            requests += [request_of(range(size, 2 * size), 10**6, context=10**7) for size in sizes]
            for request in requests[1:]:
                scheduler.add(request)
        rows = scheduler.running_sequences
        plan = scheduler.schedule((), cost.budget(target, rows, 16) if rows else None)
        prompts = [part for part in plan.parts if part.prefills]
        decoding = len(plan.parts) - len(prompts)
        keys = sum(part.count * (part.start + part.count / 2) for part in prompts)
        seconds = base + per_row * decoding + per_prompt * plan.prompt_tokens + per_key / 1000 * keys
        seconds *= dice.uniform(0.95, 1.05)
        cost.note(plan.prompt_tokens, decoding, seconds, keys)
        if prompts and step > 20:
            times.append(seconds)
        for part in plan.parts:
            scheduler.advance(part, part.count)
            part.sequence.tokens += [1] * len(part.samples)
    assert all(request.sequences[0].tokens for request in requests)
    assert max(times) <= 1.25 * target + 0.02
    assert sum(times) / len(times) > 0.8 * target


def test_a_stream_waits_no_longer_than_the_target_for_the_forced_tokens_of_another() -> None:
    """A long constant of a schema. The real scheduler plans the steps; their durations are computed."""
    base, _, per_row, _ = SHAPES["1.1B"]
    requests = [request_of(range(size, 2 * size), 10**6, context=10**7) for size in (64, 80)]
    cost, is_forced, times = StepCost(), False, list[float]()
    scheduler = Scheduler(
        SchedulerLimits(32, 512, (2000,), 10**12),
        CacheSpec(16, (LayerGroup((0,), token_bytes=4),)),
        lambda sequence, running: [1] * 400 if is_forced and sequence.request is requests[0] else [],
    )
    for request in requests:
        scheduler.add(request)
    for step in range(40):
        is_forced = step > 20
        rows = scheduler.running_sequences
        plan = scheduler.schedule((), cost.budget(0.5, rows, 16) if rows else None)
        seconds = base + per_row * (plan.batch.tokens - plan.prompt_tokens) + 0.0042 * plan.prompt_tokens
        cost.note(plan.prompt_tokens, plan.batch.tokens - plan.prompt_tokens, seconds, 100.0 * plan.prompt_tokens)
        times += [seconds] if is_forced else []
        for part in plan.parts:
            if not part.drafts:
                scheduler.advance(part, part.count)
            for sequence in part.samples:
                sequence.tokens += [1] * (1 + len(part.drafts))
            if part.drafts:
                scheduler.advance(part, part.count)
    assert 0.8 * 0.5 < max(times) <= 1.05 * 0.5
    assert cost.budget(0.5, 1, 16, alone=True).most_drafts == math.inf
