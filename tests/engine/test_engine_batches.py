"""Batches of different sequences get the answers of ``generate``: long and short, with shared beginnings, at random."""

import asyncio
import math
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine import request_state
from mlserver_torch_stream.engine.api import EngineRequest, EngineStats, Mailbox
from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.step import continuous
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher, InlineForwards
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.watchdog import FairLock
from mlserver_torch_stream.types import Constraint, ConstraintKind, FinishReason
from tests.engine.tiny import (
    Watch,
    batcher_over,
    decodes,
    dictated,
    greedy,
    idle,
    prompt_of,
    reference,
    run,
    run_with_engine,
    running,
    spelled,
    tiny_model,
    tokens_of,
    until,
    watched,
)
from tests.waiting import wait_until

LONG = 2048
_SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=LONG)


TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # keys and values of three layers with two heads of 8 floats


class Clock:
    """Stands for ``time`` in the modules that measure steps. It moves only when a forward says how long it takes.

    So what an engine learns of its steps does not depend on the machine.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (continuous, request_state):
        monkeypatch.setattr(module, "time", clock)
    return clock


async def seen(engine: EngineCore, stats: list[EngineStats]) -> None:
    while True:
        stats.append(engine.stats())
        await asyncio.sleep(0)


@pytest.mark.long
def test_long_and_short_sequences_decode_in_one_forward_and_pay_for_their_own_tokens(
    model: PreTrainedModel, watch: Watch
) -> None:
    requests = [(prompt_of(1500, 1), 30), (prompt_of(5, 2), 60), (prompt_of(1400, 3), 30), (prompt_of(30, 4), 60)]
    expected = [reference(model, prompt, count) for prompt, count in requests]

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 4))
        sequences = [asyncio.create_task(tokens_of(engine, prompt, greedy(count))) for prompt, count in requests]
        await watch.stopped()
        live = sum(len(prompt) for prompt, _ in requests)
        assert live < engine.stats().kv_cache_bytes / TOKEN_BYTES < 1.1 * live + 4 * 60
        watch.let_go()
        assert [await sequence for sequence in sequences] == expected
        await until(lambda: idle(engine), "an idle engine")

    with running(model, context=LONG, prefill_tokens=512) as engine:
        watch.calls.clear()
        run(scenario(engine))
    assert max(len(step) for step in watch.steps) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_long_run_with_many_short_visitors_stays_right(family: str) -> None:
    """The long sequence's window frees page after page, which the short sequences use."""
    model = tiny_model(family, max_position_embeddings=1024)
    visitors = [(prompt_of(1 + 5 * i % 37, i), 1 + 7 * i % 40) for i in range(40)]
    expected = [reference(model, prompt, count) for prompt, count in visitors]
    stayer = reference(model, prompt_of(20, 99), 500)

    async def scenario(engine: EngineCore) -> None:
        staying = asyncio.create_task(tokens_of(engine, prompt_of(20, 99), greedy(500)))
        gate = asyncio.Semaphore(5)

        async def visit(prompt: tuple[int, ...], count: int) -> list[int]:
            async with gate:
                return await tokens_of(engine, prompt, greedy(count))

        assert await asyncio.gather(*(visit(*visitor) for visitor in visitors)) == expected
        assert await staying == stayer

    run_with_engine(scenario, model, context=1024)


@pytest.mark.long
def test_sequences_that_come_and_go_for_ever_hold_no_more_than_they_are_long(model: PreTrainedModel) -> None:
    expected = [reference(model, prompt_of(6, i), 30) for i in range(4)]
    stats: list[EngineStats] = []

    async def scenario(engine: EngineCore) -> None:
        async def again(seed: int) -> None:
            for _ in range(4):
                assert await tokens_of(engine, prompt_of(6, seed), greedy(30)) == expected[seed]

        watcher = asyncio.create_task(seen(engine, stats))
        await asyncio.gather(*(again(seed) for seed in range(4)))
        await until(lambda: idle(engine), "an idle engine")
        watcher.cancel()

    run_with_engine(scenario, model, context=LONG)
    assert 0 < max(each.kv_cache_bytes for each in stats) <= 4 * 36 * TOKEN_BYTES


@pytest.mark.long
def test_a_mixed_load_holds_hardly_more_than_the_keys_of_its_tokens(
    model: PreTrainedModel, codec: TextCodec, loop: asyncio.AbstractEventLoop
) -> None:
    """With pages of the default size, measured after each step in which at least half of the places are taken."""
    chance, ratios = random.Random(3), list[float]()
    batcher = batcher_over(model, page_size=CPU_PAGE_SIZE, prefill_tokens=64, max_num_seqs=16)
    scheduler = batcher._scheduler
    loads = [(chance.choice([24, 40, 90, 200, 400]), chance.randint(16, 90)) for _ in range(40)]
    requests = list[RequestState]()  # these keep the sequences of the batcher alive
    for step in range(2000):
        if loads and step % 6 == 0:
            prompt, count = loads.pop()
            given = EngineRequest(tuple(chance.randrange(250) for _ in range(prompt)), greedy(count))
            requests.append(RequestState(given, Mailbox(loop, 1, lambda mailbox: None), codec, (), LONG))
            batcher.add(requests[-1])
        with torch.inference_mode():
            batcher.step(lambda sequences: None, lambda: False, lambda: None)
        computed = [each.computed for each in scheduler.admitted]
        if len(computed) >= 8:
            ratios.append(batcher.stats.kv_cache_bytes / TOKEN_BYTES / sum(computed))
        if not loads and all(request.finished for request in requests):
            break
    assert len(ratios) > 100 and all(request.finished for request in requests)
    assert 1 < max(ratios) <= 1.3
    assert batcher.stats.kv_cache_bytes == 0 and batcher.stats.num_preemptions == 0


def test_a_flood_of_short_prompts_does_not_keep_a_stream_waiting(model: PreTrainedModel, watch: Watch) -> None:
    """Each forward computes the stream's next token, and at most ``chunked_prefill_size`` tokens of prompts."""
    ends = 16, 32, 512

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        stream = asyncio.create_task(tokens_of(engine, prompt_of(5), greedy(60)))
        await watch.stopped()
        watch.calls.clear()
        length, count, _ = ends
        seeds = range(1, count + 1)
        flood = [asyncio.create_task(tokens_of(engine, prompt_of(length, seed), greedy(4))) for seed in seeds]
        await asyncio.sleep(0)  # they are submitted
        watch.let_go()
        await asyncio.gather(stream, *flood)

    run_with_engine(scenario, model, prefill_tokens=ends[2], max_num_seqs=40)
    calls = watch.calls[:50]  # the stream goes on for longer than these
    assert all(len(call[0]) == 1 for call in calls)
    prefilled = [sum(len(ids) for ids in call if len(ids) > 1) for call in calls]
    assert sum(prefilled) == 16 * 32 and max(prefilled) <= 512
    assert sum(map(bool, prefilled)) <= 3  # many prompts in a forward


@pytest.mark.long
def test_the_chunks_beside_a_stream_follow_the_target_and_change_no_token(
    model: PreTrainedModel, watch: Watch, clock: Clock
) -> None:
    """A prompt token takes 2 ms here, so about 20 of them fit into a target of 50 ms, and all into one of an hour."""
    prompts = [prompt_of(300, seed) for seed in range(2)]
    expected = [reference(model, prompt_of(5), 200), *(reference(model, prompt, 4) for prompt in prompts)]

    def take_time(call: list[list[int]]) -> None:
        clock.now += 0.001 + 0.002 * sum(len(ids) for ids in call if len(ids) > 1)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        stream = asyncio.create_task(tokens_of(engine, prompt_of(5), greedy(200)))
        await watch.stopped()
        watch.calls.clear()
        late = [asyncio.create_task(tokens_of(engine, prompt, greedy(4))) for prompt in prompts]
        await asyncio.sleep(0)  # they are submitted
        watch.let_go()
        assert [await each for each in (stream, *late)] == expected
        assert engine.stats().mixed_step_seconds > 0.002 * 600

    largest = []
    watch.fail = take_time
    for target in (0.05, 3600.0):
        run_with_engine(scenario, model, prefill_tokens=512, context=LONG, step_target=target)
        largest.append(max(sum(len(ids) for ids in call if len(ids) > 1) for call in watch.calls))
    assert largest[0] <= 50 < 150 <= largest[1]


@pytest.mark.long
def test_a_reader_of_a_character_of_three_tokens_waits_for_one_step_with_prompts(
    model: PreTrainedModel, watch: Watch, clock: Clock
) -> None:
    """The target has time for one page of a prompt, at 2 ms a token, and a character is three tokens."""
    ids = spelled("日本語")
    prompt_tokens: list[int] = []  # of all prompts in the steps between two events of the stream

    async def scenario(engine: EngineCore) -> None:
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(240))])
        await anext(stream)
        late = [asyncio.create_task(tokens_of(engine, prompt_of(320, seed), greedy(1))) for seed in range(2)]
        async for _ in stream:
            pass
        await asyncio.gather(*late)

    def take_time(call: list[list[int]]) -> None:
        if [ids[2]] in call or [ids[5]] in call or [ids[8]] in call:  # the reader has got the character
            prompt_tokens.append(0)
        chunks = sum(len(row) for row in call if len(row) > 1)
        if prompt_tokens:
            prompt_tokens[-1] += chunks
        clock.now += 0.001 + 0.002 * chunks

    watch.fail = take_time
    options = {"prefill_tokens": 512, "page_size": 16, "context": LONG, "step_target": 0.05}
    with running(model, **options) as engine, dictated(model, ids, prompt=5):
        run(scenario(engine))
    assert sum(prompt_tokens) >= 600
    assert sum(tokens > 32 for tokens in prompt_tokens) <= 2  # before the cost of a prompt token was known


@pytest.mark.long
def test_characters_of_several_streams_do_not_keep_a_prompt_out(
    model: PreTrainedModel, codec: TextCodec, loop: asyncio.AbstractEventLoop, watch: Watch
) -> None:
    """A step of decoding takes 40 ms of a target of 100 ms. At each step, a reader has waited for two of them."""
    batcher = batcher_over(model, page_size=4, prefill_tokens=512, step_target=0.1)
    watch.fail = lambda call: time.sleep(0.04 + 0.001 * sum(len(row) for row in call if len(row) > 1))

    def add(prompt: tuple[int, ...], count: int) -> RequestState:
        mailbox = Mailbox(loop, 1, lambda mailbox: None)
        batcher.add(request := RequestState(EngineRequest(prompt, greedy(count)), mailbox, codec, (), LONG))
        return request

    def step() -> None:
        with torch.inference_mode():
            batcher.step(lambda sequences: [each.take_events() for each in sequences], lambda: False, lambda: None)

    with dictated(model, spelled("日本語"), prompt=5):
        streams = []
        for seed in range(3):  # each is a token behind the one before it
            streams.append(add(prompt_of(5, seed), 200))
            step()
        for _ in range(9):
            step()
        late = add(prompt_of(60, 3), 1)
        for _ in range(60):
            step()
    assert late.finished and not any(stream.finished for stream in streams)


@pytest.mark.long
def test_a_prompt_or_a_preempted_sequence_that_has_waited_for_long_gets_a_larger_share_of_a_step(
    model: PreTrainedModel, codec: TextCodec, loop: asyncio.AbstractEventLoop, watch: Watch, clock: Clock
) -> None:
    """Decoding takes 40 ms, twice the target, so a prompt gets a quarter of that time at first, at 1 ms a token."""
    batcher = batcher_over(model, page_size=4, prefill_tokens=512, step_target=0.02)

    def add(prompt: tuple[int, ...], count: int, age: float = 0.0) -> RequestState:
        mailbox = Mailbox(loop, 1, lambda mailbox: None)
        request = RequestState(EngineRequest(prompt, greedy(count)), mailbox, codec, (), LONG)
        request.whole_at -= age
        batcher.add(request)
        step_until(request, min(count, 10))
        return request

    def step_until(request: RequestState, tokens: int) -> None:
        while len(request.sequences[0].tokens) < tokens:
            with torch.inference_mode():
                batcher.step(lambda sequences: None, lambda: False, lambda: None)

    def take_time(call: list[list[int]]) -> None:
        clock.now += 0.04 + 0.001 * sum(len(row) for row in call if len(row) > 1)

    watch.fail = take_time
    stream = add(prompt_of(5), 500)
    steps = []
    for seed, age in ((1, 0.0), (2, 0.0), (3, 1000.0)):
        watch.calls.clear()
        add(prompt_of(200, seed), 1, age)
        steps.append(len(watch.calls))
    assert steps[2] < 0.7 * steps[1]
    preempted = add(prompt_of(200, 4), 500)
    for age in (0.0, 1000.0):
        watch.calls.clear()
        batcher._scheduler.restarts.recompute(preempted.sequences)
        clock.now += age
        step_until(preempted, len(preempted.sequences[0].tokens) + 1)
        steps.append(len(watch.calls))
    assert steps[4] < 0.7 * steps[3]
    assert not stream.finished


def added(
    batcher: ContinuousBatcher,
    codec: TextCodec,
    loop: asyncio.AbstractEventLoop,
    prompt: tuple[int, ...],
    count: int,
    interval: tuple[int, float] = (1, math.inf),
    **more: Any,
) -> RequestState:
    """Adds a request. ``more`` are fields of ``EngineRequest``."""
    given, mailbox = EngineRequest(prompt, greedy(count), **more), Mailbox(loop, 1, lambda mailbox: None)
    batcher.add(request := RequestState(given, mailbox, codec, (), LONG, event_interval=interval))
    return request


def prompt_tokens_of_step(batcher: ContinuousBatcher) -> int:
    """Runs a step, whose events are taken at once."""
    before = batcher.stats.prefill_tokens
    with torch.inference_mode():
        batcher.step(lambda sequences: [each.take_events() for each in sequences], lambda: False, lambda: None)
    return batcher.stats.prefill_tokens - before


@pytest.mark.long
def test_forced_tokens_keep_to_the_target_if_another_stream_waits_for_them(
    model: PreTrainedModel, codec: TextCodec, loop: asyncio.AbstractEventLoop, watch: Watch, clock: Clock
) -> None:
    batcher = batcher_over(model, page_size=4, prefill_tokens=512, step_target=0.05)
    constant = codec.submit(Constraint(ConstraintKind.REGEX, "a{200}", "field")).result()

    def take_time(call: list[list[int]]) -> None:
        clock.now += 0.01 + 0.001 * sum(map(len, call))

    watch.fail = take_time
    longest = []
    for count in (20, 1000):
        stream = added(batcher, codec, loop, prompt_of(5), count)
        for _ in range(20):
            prompt_tokens_of_step(batcher)
        forced = added(batcher, codec, loop, prompt_of(5, 1), 300, constraint=constant)
        watch.calls.clear()
        while not forced.finished:
            prompt_tokens_of_step(batcher)
        longest.append(max(len(row) for call in watch.calls for row in call))
        assert stream.finished == (count == 20) and len(forced.sequences[0].tokens) == 200
    assert longest[0] >= 150 and longest[1] <= 45


@pytest.mark.long
def test_a_second_batch_that_nothing_is_left_for_does_not_count_as_a_step_without_prompts(
    model: PreTrainedModel, codec: TextCodec, loop: asyncio.AbstractEventLoop, watch: Watch, clock: Clock
) -> None:
    """Characters are three tokens, and two steps of decoding take longer than the target."""
    flights: InlineForwards[Any, Logits] = InlineForwards()
    flights.most = 2
    batcher = batcher_over(model, page_size=4, prefill_tokens=512, step_target=0.06, flights=flights)

    def take_time(call: list[list[int]]) -> None:
        clock.now += 0.04 + 0.001 * sum(len(row) for row in call if len(row) > 1)

    watch.fail = take_time
    with dictated(model, spelled("日"), prompt=5):
        stream = added(batcher, codec, loop, prompt_of(5), 500)
        for _ in range(8):
            prompt_tokens_of_step(batcher)
        learned = added(batcher, codec, loop, prompt_of(100, 1), 1)
        while not learned.finished:
            prompt_tokens_of_step(batcher)
        late, tokens = added(batcher, codec, loop, prompt_of(60, 3), 1), [0] * 3
        while not late.finished:
            incomplete = len(stream.sequences[0].tokens) % 3
            tokens[incomplete] += prompt_tokens_of_step(batcher)
    assert tokens == [60, 0, 0] and not stream.finished


@pytest.mark.long
def test_a_sequence_that_is_computed_again_while_no_other_decodes_is_not_paced(
    model: PreTrainedModel, codec: TextCodec, loop: asyncio.AbstractEventLoop, watch: Watch, clock: Clock
) -> None:
    batcher = batcher_over(model, page_size=4, prefill_tokens=512, step_target=0.02)

    def take_time(call: list[list[int]]) -> None:
        clock.now += 0.04 + 0.001 * sum(len(row) for row in call if len(row) > 1)

    watch.fail = take_time
    stream = added(batcher, codec, loop, prompt_of(200), 500)
    for _ in range(5):
        prompt_tokens_of_step(batcher)
    batcher._scheduler.restarts.recompute(stream.sequences)
    assert prompt_tokens_of_step(batcher) == 205
    assert prompt_tokens_of_step(batcher) == 0 and len(stream.sequences[0].tokens) == 7


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_no_prompt_waits_for_more_than_three_steps(
    model: PreTrainedModel,
    codec: TextCodec,
    loop: asyncio.AbstractEventLoop,
    watch: Watch,
    clock: Clock,
    seed: int,
) -> None:
    """Whatever the streams write, how long steps take, and however often the machine pauses."""
    dice = random.Random(seed)
    base, per_token = dice.choice([0.001, 0.02, 0.2]), dice.choice([1e-5, 1e-3, 1e-2])
    batcher = batcher_over(model, page_size=4, prefill_tokens=64, step_target=dice.choice([0.02, 0.1, 0.5]))

    def take_time(call: list[list[int]]) -> None:
        clock.now += dice.uniform(0.5, 2) * (base + per_token * sum(map(len, call))) + 10 * (dice.random() < 0.03)

    watch.fail = take_time
    waited = longest = 0
    with dictated(model, spelled("a日本語😀 ok"), prompt=5):
        intervals = [dice.choice([(1, math.inf), (2, math.inf), (9, 0.05)]) for _ in range(4)]
        streams = [
            added(batcher, codec, loop, prompt_of(5 + number, number), 1000, interval)
            for number, interval in enumerate(intervals)
        ]
        late: list[RequestState] = []
        for step in range(250):
            if step % 20 == 10 and all(request.finished for request in late):
                late = [added(batcher, codec, loop, prompt_of(dice.randint(1, 90), step + more), 2) for more in (0, 1)]
            waits = batcher._scheduler.has_prompts
            waited = 0 if prompt_tokens_of_step(batcher) or not waits else waited + 1
            longest = max(longest, waited)
    assert longest <= 3 and not any(stream.finished for stream in streams)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_loads_with_drafts_and_intervals_change_no_token_and_leave_nothing_behind(
    model: PreTrainedModel,
    codec: TextCodec,
    loop: asyncio.AbstractEventLoop,
    watch: Watch,
    clock: Clock,
    seed: int,
) -> None:
    """Streams with forced tokens, prompt lookup and intervals arrive, are cancelled and preempted at random times."""
    dice, text, lookup = random.Random(seed), spelled("a日本語a日本語😀 ok"), PromptLookup(8)
    base, per_token = dice.choice([0.001, 0.02, 0.2]), dice.choice([1e-5, 1e-3, 1e-2])
    target, limit = dice.choice([None, 0.02, 0.1, 0.5]), dice.choice([8, 64])
    options: dict[str, Any] = {
        "prefill_tokens": limit,
        "step_target": target,
        "lookup": lookup,
        "cache_bytes": TOKEN_BYTES * 300,
    }
    batcher = batcher_over(model, **options)
    constants = {count: codec.submit(Constraint(ConstraintKind.REGEX, f"a{{{count}}}", "field")) for count in (3, 90)}
    answers: dict[RequestState, list[int]] = {}
    cancelled: set[RequestState] = set()

    def add() -> None:
        prompt, count = prompt_of(dice.randint(1, 90), dice.randint(0, 2)), dice.randint(1, 90)
        forced = dice.choice([None, None, *constants])
        constraint = None if forced is None else constants[forced].result()
        interval = dice.choice([(1, math.inf), (2, math.inf), (40, math.inf), (40, 0.3)])
        fields: dict[str, Any] = {"constraint": constraint, "priority": dice.randint(0, 1)}
        request = added(batcher, codec, loop, prompt, count, interval, **fields)
        answer = [text[(len(prompt) + number - 5) % len(text)] for number in range(count)]
        answers[request] = answer if forced is None else (spelled("a") * forced)[:count]

    def take_time(call: list[list[int]]) -> None:
        clock.now += dice.uniform(0.5, 2) * (base + per_token * sum(map(len, call))) + 10 * (dice.random() < 0.03)
        decoding = batcher._scheduler.running_sequences
        assert sum(map(len, call)) <= limit + decoding

    watch.fail = take_time
    with dictated(model, text, prompt=5):
        for step in range(200):
            if step < 120 and dice.random() < 0.25:
                add()
            if step < 120 and dice.random() < 0.03 and answers:
                request = dice.choice(list(answers))
                cancelled.add(request)
                request.finish(FinishReason.ABORT)
                batcher.evict([request])
            prompt_tokens_of_step(batcher)
        for _ in range(2000):
            if not all(request.finished for request in answers):
                prompt_tokens_of_step(batcher)
    for request, answer in answers.items():
        assert request.finished
        tokens = request.sequences[0].tokens
        assert tokens == (answer[: len(tokens)] if request in cancelled else answer)
    assert batcher.stats.kv_cache_bytes == 0 and batcher.stats.forced_tokens > 0
    assert not (batcher._busy or batcher._drafter._forced or lookup._drafted or batcher._scheduler.admitted)


@pytest.mark.long
def test_a_prompt_leaves_time_for_the_streams_of_another_engine_on_the_device(
    model: PreTrainedModel, watch: Watch, clock: Clock
) -> None:
    """A prompt token takes 2 ms, and both engines together take 100 ms, so about 25 tokens fit into a step.

    The engine with the prompt always has to wait for the other one, whose forwards last until it does.
    """
    lock, other, answered = FairLock(), tiny_model("llama", seed=1), threading.Event()

    async def scenario(engine: EngineCore, streaming: EngineCore, beside: Watch) -> None:
        stream = asyncio.create_task(tokens_of(streaming, prompt_of(5), greedy(230)))
        await beside.hold()
        late = asyncio.create_task(tokens_of(engine, prompt_of(400), greedy(1)))
        await until(lambda: bool(lock._waiting), "the engine that waits")
        beside.fail = lambda ids: wait_until(lambda: lock._waiting or answered.is_set(), "the engine that waits")
        beside.let_go()
        await late
        answered.set()
        await stream

    def take_time(call: list[list[int]]) -> None:
        clock.now += 0.002 * sum(len(row) for row in call if len(row) > 1)

    options = {"prefill_tokens": 512, "context": LONG, "step_target": 0.1, "fair_lock": lock}
    with running(model, **options) as engine, watched(other) as beside, running(other, **options) as streaming:
        watch.fail = take_time
        watch.calls.clear()
        run(scenario(engine, streaming, beside))
    assert max(len(row) for call in watch.calls for row in call) <= 100


def test_a_beginning_of_many_requests_at_once_is_computed_once_and_held_once(model: PreTrainedModel) -> None:
    shared = prompt_of(1000, 3)
    prompts = [(*shared, 200 + seed, 7) for seed in range(32)]
    expected = {seed: reference(model, prompts[seed], 8) for seed in (0, 17, 31)}
    stats: list[EngineStats] = []

    async def scenario(engine: EngineCore) -> list[list[int]]:
        watcher = asyncio.create_task(seen(engine, stats))
        found = await asyncio.gather(*(tokens_of(engine, prompt, greedy(8)) for prompt in prompts))
        await until(lambda: idle(engine), "an idle engine")
        watcher.cancel()
        return list(found)

    with running(
        model, context=LONG, prefill_tokens=512, max_num_seqs=32, page_size=8, cache_bytes=2**22, prefix_bytes=2**20
    ) as engine:
        found = run(scenario(engine))
        last = engine.stats()
    assert all(found[seed] == tokens for seed, tokens in expected.items())
    assert last.prefill_tokens == 1000 + 32 * 2
    assert last.prefix_cache_hit_tokens == 31 * 1000
    held = max(each.kv_cache_bytes for each in stats) / TOKEN_BYTES
    assert 1000 < held <= 1000 + 32 * 16  # two pages of its own for each


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("lfm2", marks=pytest.mark.long), pytest.param("gemma2", marks=_SLOW)]
)
def test_many_sequences_of_a_prompt_share_few_pages_and_are_preempted_rightly(family: str) -> None:
    """Five answers to a prompt of 30 tokens run in memory that would hold only two of them without sharing."""
    model = tiny_model(family)
    prompt, other = prompt_of(30, 1), prompt_of(9, 2)
    expected, beside = reference(model, prompt, 25), reference(model, other, 40)

    async def scenario(engine: EngineCore) -> None:
        neighbour = asyncio.create_task(tokens_of(engine, other, greedy(40)))
        stream = engine.submit([EngineRequest(prompt, greedy(25, n=2)), EngineRequest(prompt, greedy(25, n=3), 2)])
        tokens: dict[int, list[int]] = {}
        async for event in stream:
            assert event.error is None, event.error
            tokens.setdefault(event.index, []).extend(event.token_ids)
        assert tokens == dict.fromkeys(range(5), expected)
        assert await neighbour == beside
        await until(lambda: idle(engine), "an idle engine")

    findings = check_batching(model)
    assert findings.spec is not None
    room = replace(findings.spec, page_size=4).sequence_bytes(55) * 3 + 6 * findings.spec.state_bytes
    run_with_engine(scenario, model, cache_bytes=room, findings=findings)


def test_whole_prompts_where_they_cannot_be_cut(model: PreTrainedModel, watch: Watch) -> None:
    requests = [(prompt_of(9 + i, i), 10) for i in range(6)]
    expected = [reference(model, prompt, count) for prompt, count in requests]

    async def scenario(engine: EngineCore) -> None:
        opened = engine.submit([EngineRequest((), greedy(10), open=True)])
        opened.extend(requests[0][0][:5])
        assert await asyncio.gather(*(tokens_of(engine, *_greedy(request)) for request in requests)) == expected
        opened.seal(requests[0][0])
        assert [token async for event in opened for token in event.token_ids] == expected[0]

    watch.calls.clear()
    with running(model, prefill_tokens=None, context=LONG) as engine:
        checks = len(watch.calls)
        run(scenario(engine))
    prefills = [len(ids) for call in watch.calls[checks:] for ids in call if len(ids) > 1]
    assert sorted(prefills) == sorted([len(prompt) for prompt, _ in requests] + [len(requests[0][0])])


def _greedy(request: tuple[tuple[int, ...], int]) -> tuple[tuple[int, ...], object]:
    return request[0], greedy(request[1])


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=_SLOW)])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=_SLOW) for each in ("gemma2", "lfm2", "gpt_oss", "qwen3_next"))]
)
def test_random_company(family: str, seed: int) -> None:
    """Requests arrive, are cancelled, come in pieces and end at random, with a cache that holds only some of them."""
    model = tiny_model(family, max_position_embeddings=1024, seed=seed)
    chance = random.Random(f"{family} {seed}")
    prompts = [prompt_of(length, seed) for length in (1, 2, 5, 17, 30, 70, 300) for seed in range(2)]
    answers = {prompt: reference(model, prompt, 60) for prompt in prompts}

    async def one(engine: EngineCore) -> None:
        prompt, count = chance.choice(prompts), chance.choice([1, 2, 9, 25, 60])
        length, wanted = len(prompt), answers[prompt][:count]
        for _ in range(chance.randrange(150)):
            await asyncio.sleep(0)
        in_pieces, patience = chance.random() < 0.3, chance.choice([None, None, 1, 8])
        n = 1 if in_pieces else chance.choice([1, 1, 2])
        stream = engine.submit([EngineRequest(() if in_pieces else prompt, greedy(count, n=n), open=in_pieces)])
        if in_pieces:
            stream.extend(prompt[: length // 2])
            await asyncio.sleep(0)
            stream.seal(prompt)
        tokens: dict[int, list[int]] = {}
        async for event in stream:
            assert event.error is None, event.error
            tokens.setdefault(event.index, []).extend(event.token_ids)
            if patience is not None and len(tokens.get(0, [])) >= patience:
                break
        stream.close()
        for got in tokens.values():
            assert got == wanted[: len(got)]
        assert patience is not None or all(len(got) == count for got in tokens.values())

    async def scenario(engine: EngineCore) -> None:
        await asyncio.gather(*(one(engine) for _ in range(40)))
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().wasted_tokens == 0

    run_with_engine(scenario, model, context=1024, prefill_tokens=16, max_queued_requests=100, cache_bytes=2**20)
