"""If a forward leaves the engine's thread free, the text of a step is made while the next forward runs.

Here the forward of a tiny model runs in a thread, in place of a GPU. Clients get the same events.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher, InlineForwards
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.engine.step.step_cost import StepCost
from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.text.tool_parsers import HermesCalls
from mlserver_torch_stream.engine.watchdog import FairLock, StepProgress
from mlserver_torch_stream.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    SamplingParameters,
    TokenEvent,
)
from tests.engine.tiny import (
    batcher_over,
    byte_tokenizer,
    collect,
    dictated,
    greedy,
    idle,
    prompt_of,
    run,
    run_with_engine,
    running,
    spelled,
    tokens_of,
    until,
    watched,
)

PAGE = 4
BOUND = 20  # seconds that no step takes


@pytest.fixture(scope="module")
def findings(model: PreTrainedModel) -> SelfCheckResult:
    with torch.inference_mode():
        return check_batching(model)


def in_a_thread() -> InFlightForwards[Any, Logits]:
    return InFlightForwards(1, 1, PAGE)


class Meeting:
    """A forward that ends when the previous step's text is delivered, which waits until the forward starts."""

    def __init__(self, forward: ModelForward, steps: int) -> None:
        self._forward = forward
        self._started = [threading.Event() for _ in range(steps)]
        self._delivered = [threading.Event() for _ in range(steps)]
        self.calls = self.deliveries = 0

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        number = self.calls
        self.calls += 1
        self._started[number].set()
        logits = self._forward(batch, cache)
        assert number == 0 or self._delivered[number - 1].wait(BOUND), "no text came beside the forward"
        return logits

    def deliver(self, sequences: Sequence[SequenceState]) -> None:
        number = self.deliveries
        self.deliveries += 1
        if number + 1 < len(self._started):
            assert self._started[number + 1].wait(BOUND), "the next forward was not launched before the text"
        self._delivered[number].set()


def test_the_text_of_a_step_is_delivered_while_the_next_forward_runs(
    model: PreTrainedModel, codec: TextCodec, findings: SelfCheckResult, loop: asyncio.AbstractEventLoop
) -> None:
    steps = 6
    forward = Meeting(ModelForward(model, findings.way), steps)
    batcher = batcher_over(model, findings, prefill_tokens=64, forward=forward, flights=in_a_thread())
    asked = EngineRequest(prompt_of(5), greedy(steps))
    request = RequestState(asked, Mailbox(loop, 1, lambda mailbox: None), codec, (), 100)
    batcher.add(request)
    try:
        for _ in range(2 * steps):
            if not batcher.step(forward.deliver, lambda: None, lambda: None):
                break
        assert request.finished and len(request.sequences[0].tokens) == forward.calls == forward.deliveries == steps
    finally:
        batcher.close()


def test_a_sequence_that_its_text_ends_leaves_the_step_that_was_launched(
    model: PreTrainedModel, findings: SelfCheckResult
) -> None:
    """Its token of that step is dropped, its pages are freed, and the other sequence goes on."""
    said = spelled("one two three four five six")
    with dictated(model, said, prompt=6), watched(model) as watch:

        async def scenario(engine: EngineCore) -> tuple[TokenEvent, list[int]]:
            stopped = EngineRequest(prompt_of(6), greedy(25, stop=("thr",)))
            events = await collect(engine, [stopped, EngineRequest(prompt_of(6, 1), greedy(25), 1)])
            await until(lambda: idle(engine), "an idle engine")
            return events[0], list(events[1].token_ids)

        with running(model, findings=findings, prefill_tokens=64, flights=in_a_thread()) as engine:
            event, other = run(scenario(engine))
            assert engine.stats().generation_tokens == len(event.token_ids) + len(other)
    assert (event.text, event.stop_reason) == ("one two ", "thr")
    assert event.usage is not None and event.usage.num_output_tokens == len(event.token_ids) == len("one two thr")
    assert other == said[:25]
    r = said[len("one two th")]
    assert [[r], [r]] in watch.calls or any(call.count([r]) == 2 for call in watch.calls)


def _requests(codec: TextCodec, answers: Sequence[TokenEvent], dice: random.Random) -> list[EngineRequest]:
    """Returns requests of all kinds. Their stop strings are taken from ``answers``, those of the plain requests."""
    asked = []
    for seed, answer in enumerate(answers):
        prompt, kind = prompt_of(3 + seed, seed), dice.randrange(7)
        params = SamplingParameters(max_tokens=30, temperature=1.0, seed=seed)
        found = re.findall(r"[!-~]{1,2}", answer.text)
        stop = (dice.choice(found),) if found and kind != 6 else ()
        changes: dict[str, Any] = [
            {"stop": stop},
            {"stop": stop, "include_stop_str_in_output": True, "min_tokens": 4},
            {"n": 3, "stop": stop},
            {"logprobs": True, "top_logprobs": 2, "stop": stop},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "stop": stop},
            {"temperature": 0.0, "stop": stop},
            {"max_tokens": 60},
        ][kind]
        constraint = (
            codec.submit(Constraint(ConstraintKind.REGEX, "[a-e]{4,12}", "field")).result() if kind == 6 else None
        )
        asked.append(EngineRequest(prompt, replace(params, **changes), 3 * seed, constraint=constraint))
    return asked


def _without_times(event: TokenEvent) -> TokenEvent:
    assert event.usage is not None
    return replace(event, usage=replace(event.usage, queue_s=0.0, ttft_s=0.0))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_that_of_the_ordinary_order(
    model: PreTrainedModel, codec: TextCodec, findings: SelfCheckResult, seed: int
) -> None:
    """Combines stop strings, log-probabilities, penalties, constraints, drafts and n, with memory for few sequences."""
    dice = random.Random(seed)
    assert findings.spec is not None
    few = 45 * replace(findings.spec, page_size=PAGE).page_bytes(0)
    more: dict[str, Any] = {"findings": findings, "prefix_bytes": 2**20, **({"cache_bytes": few} if seed % 2 else {})}

    async def all_of(engine: EngineCore, requests: list[EngineRequest], gaps: list[int]) -> dict[int, TokenEvent]:
        async def one(request: EngineRequest, gap: int) -> dict[int, TokenEvent]:
            for _ in range(gap):
                await asyncio.sleep(0.001)
            return await collect(engine, [request])

        found = await asyncio.gather(*(one(*each) for each in zip(requests, gaps, strict=True)))
        await until(lambda: idle(engine), "an idle engine")
        return {index: _without_times(event) for events in found for index, event in events.items()}

    plain = [
        EngineRequest(prompt_of(3 + n, n), SamplingParameters(max_tokens=30, temperature=1.0, seed=n), n)
        for n in range(9)
    ]
    with running(model, **more) as engine:
        answers = run(all_of(engine, plain, [0] * 9))
        requests = _requests(codec, [answers[n] for n in range(9)], dice)
        expected = run(all_of(engine, requests, [0] * 9))
    lookup = PromptLookup(4) if seed % 3 == 0 else None
    with running(model, **more, flights=in_a_thread(), lookup=lookup) as engine:
        found = run(all_of(engine, requests, [dice.randrange(30) for _ in requests]))
        stats = engine.stats()
    assert {event.finish_reason for event in expected.values()} >= {FinishReason.STOP, FinishReason.LENGTH}
    assert found.keys() == expected.keys()
    for index, event in expected.items():
        same = found[index]
        assert (same.text, same.token_ids, same.finish_reason, same.stop_reason) == (
            event.text,
            event.token_ids,
            event.finish_reason,
            event.stop_reason,
        )
        assert same.usage is not None and event.usage is not None
        assert same.usage.num_output_tokens == event.usage.num_output_tokens == len(same.token_ids)
        assert [each.logprob for each in same.logprobs] == pytest.approx(
            [each.logprob for each in event.logprobs], abs=1e-4
        )
    assert stats.generation_tokens == sum(len(event.token_ids) for event in found.values())


def test_a_call_that_must_be_the_only_one_ends_its_sequence(model: PreTrainedModel, findings: SelfCheckResult) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    said = spelled(f"{call} and more")
    answer = AnswerFormat(None, lambda: HermesCalls({"look"}, parallel=False))
    with (
        dictated(model, said, prompt=5),
        running(model, findings=findings, prefill_tokens=64, flights=in_a_thread()) as engine,
    ):
        event = run(collect(engine, [EngineRequest(prompt_of(5), greedy(len(said)), answer=answer)]))[0]
        assert event.finish_reason is FinishReason.TOOL_CALLS
        assert event.usage is not None and event.usage.num_output_tokens <= len(call)


def test_whoever_leaves_or_fails_harms_nobody(model: PreTrainedModel, findings: SelfCheckResult) -> None:
    poison = 251
    with watched(model) as watch:
        watch.fail = lambda ids: RuntimeError("poisoned") if any(poison in row for row in ids) else None

        async def scenario(engine: EngineCore) -> None:
            expected = await tokens_of(engine, prompt_of(9, 1), greedy(60))
            other = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), greedy(60)))
            failing = asyncio.create_task(
                collect(engine, [EngineRequest(prompt_of(7, 2), greedy(50, logit_bias={poison: 1e6}))])
            )
            leaver = engine.submit([EngineRequest(prompt_of(5), greedy(20_000))])  # which take many seconds
            for _ in range(3):
                await anext(leaver)
            leaver.close()
            assert await other == expected
            failed = (await failing)[0]
            assert failed.finish_reason is FinishReason.ERROR and list(failed.token_ids) == [poison]
            await until(lambda: idle(engine), "an idle engine")
            assert engine.stats().cancelled_sequences == 1

        run_with_engine(scenario, model, findings=findings, prefill_tokens=64, flights=in_a_thread(), context=20_005)


def _answer(
    model: PreTrainedModel,
    loop: asyncio.AbstractEventLoop,
    count: int,
    poll: Callable[[ContinuousBatcher, RequestState], None],
) -> int:
    """Runs an answer of ``count`` tokens, and calls ``poll`` in each step after the ids are known and before the text
    is.

    Returns the number of generated tokens that the batcher has counted.
    """
    batcher = batcher_over(model, prefill_tokens=64, flights=InlineForwards(overlap=True))
    asked = EngineRequest(prompt_of(5), greedy(count))
    request = RequestState(asked, Mailbox(loop, 1, lambda mailbox: None), TextCodec(byte_tokenizer()), (), 100)
    batcher.add(request)
    with torch.inference_mode():
        for _ in range(2 * count):
            batcher.step(lambda sequences: None, lambda: poll(batcher, request), lambda: None)
    assert request.finished
    return batcher.stats.generation_tokens


def test_tokens_of_a_sequence_that_is_cancelled_before_their_text_are_counted(
    model: PreTrainedModel, loop: asyncio.AbstractEventLoop
) -> None:
    cancelled: list[SequenceState] = []

    def cancel(batcher: ContinuousBatcher, request: RequestState) -> None:
        if len(request.sequences[0].tokens) == 4:
            request.sequences[0].finish(FinishReason.ABORT)
            batcher.evict([request])
            cancelled.append(request.sequences[0])

    counted = _answer(model, loop, 20, cancel)
    assert counted == len(cancelled[0].tokens) > 0


def test_a_sequence_whose_ids_have_ended_it_is_finished(
    model: PreTrainedModel, loop: asyncio.AbstractEventLoop
) -> None:
    """A client that leaves after its last id and before the text has not cancelled anything."""
    seen: list[tuple[int, FinishReason | None]] = []

    def leave_at_the_end(batcher: ContinuousBatcher, request: RequestState) -> None:
        if request.sequences[0].ended and not seen:
            unfinished = request.unfinished
            request.sequences[0].finish(FinishReason.ABORT)
            seen.append((unfinished, request.sequences[0].finish_reason))

    _answer(model, loop, 3, leave_at_the_end)
    assert seen == [(0, FinishReason.LENGTH)]


class _Timed(StepCost):
    """Records the duration of each step in ``seconds``."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def note(self, prompt_tokens: int, rows: int, seconds: float, keys: float = 0.0) -> None:
        self.seconds.append(seconds)
        super().note(prompt_tokens, rows, seconds, keys)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_waits_for_its_turn_on_the_device_lives_and_times_no_wait(
    model: PreTrainedModel, overlap: bool
) -> None:
    lock, lookup, cost = FairLock(), PromptLookup(2), _Timed()
    lookup.cost = cost

    async def scenario(engine: EngineCore) -> TokenEvent:
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(100))])
        await anext(stream)
        neighbour = threading.Thread(target=hold)
        neighbour.start()
        events = [event async for event in stream]
        neighbour.join()
        return events[-1]

    def hold() -> None:
        with lock.held_by(StepProgress()):
            time.sleep(3)

    flights: InlineForwards[Any, Any] = InlineForwards(overlap=overlap)
    with running(model, prefill_tokens=64, flights=flights, fair_lock=lock, step_timeout=2.0, lookup=lookup) as engine:
        last = run(scenario(engine))
    assert last.finish_reason is FinishReason.LENGTH, last.error
    assert len(cost.seconds) > 10 and max(cost.seconds) < 3
