"""Closing a stream frees its row and its cache at once, and does not affect other streams."""

import asyncio
import random

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.watchdog import FairLock
from tests.engine.tiny import (
    Watch,
    decodes,
    greedy,
    idle,
    one_by_one,
    prompt_of,
    reference,
    run,
    run_with_engine,
    running,
    tokens_of,
    until,
)

LONG = 20_000  # tokens, which take many seconds: no answer of them ends while a test waits for something else


def endless(engine: EngineCore, seed: int = 0, prompt: int = 5) -> EngineRequest:
    return EngineRequest(prompt_of(prompt, seed), greedy(engine.info.max_model_len - prompt))


def test_close_frees_row_and_cache_and_leaves_the_others_alone(model: PreTrainedModel, watch: Watch) -> None:
    expected = reference(model, prompt_of(9, 1), 60)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 2))
        other = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), greedy(60)))
        stream = engine.submit([endless(engine)])
        await anext(stream)
        await watch.stopped()
        stream.close()
        watch.let_go()
        assert await other == expected
        await until(lambda: idle(engine), "an idle engine")
        stats = engine.stats()
        assert stats.cancelled_sequences == 1
        assert stats.wasted_tokens == 0
        assert stats.generation_tokens < 200  # it did stop

    run_with_engine(scenario, model)


def test_a_closed_row_is_in_no_forward_that_begins_later(model: PreTrainedModel, watch: Watch) -> None:
    """Checked from inside the model rather than by a counter of the engine."""

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 2))
        survivor = engine.submit([endless(engine, 1)])
        leaver = engine.submit([endless(engine, 2)])
        await watch.stopped()
        seen = len(watch.steps)
        leaver.close()
        watch.let_go()
        await until(lambda: len(watch.steps) >= seen + 3, "three steps")
        assert [len(step) for step in watch.steps[seen:]] == [1] * len(watch.steps[seen:])
        survivor.close()
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().wasted_tokens == 0

    run_with_engine(scenario, model)


def test_close_while_waiting(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        first = engine.submit([endless(engine)])
        await anext(first)
        waiting = engine.submit([EngineRequest(prompt_of(4, 3), greedy(5))])
        await until(lambda: engine.stats().waiting_requests == 1, "a request that waits")
        waiting.close()
        await until(lambda: engine.stats().waiting_requests == 0, "an empty queue")
        assert [event async for event in waiting] == []
        assert engine.stats().running_sequences == 1
        first.close()
        await until(lambda: idle(engine), "an idle engine")

    run_with_engine(scenario, model, max_num_seqs=1, context=LONG)


def test_a_stream_that_is_closed_while_its_engine_waits_for_the_device_is_not_computed(model: PreTrainedModel) -> None:
    """And a request that comes in that time is in the engine's next step."""
    expected, lock = reference(model, prompt_of(4, 1), 3), FairLock()

    async def scenario(engine: EngineCore) -> None:
        with lock:
            leaver = engine.submit([EngineRequest(prompt_of(5), greedy(3))])
            await until(lambda: bool(lock._waiting), "the engine that waits")
            late = asyncio.create_task(tokens_of(engine, prompt_of(4, 1), greedy(3)))
            await asyncio.sleep(0)  # it is submitted
            leaver.close()
        assert await late == expected
        assert engine.stats().prefill_tokens == 4

    run_with_engine(scenario, model, fair_lock=lock)


def test_close_while_a_long_prompt_is_prefilled(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(lambda ids: engine.stats().prefill_tokens >= 20)
        stream = engine.submit([EngineRequest(prompt_of(200), greedy(5))])
        await watch.stopped()
        assert engine.stats().prefill_tokens < 200
        stream.close()
        watch.let_go()
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().prefill_tokens < 200
        assert engine.stats().generation_tokens == 0
        assert engine.stats().cancelled_sequences == 1

    run_with_engine(scenario, model, prefill_tokens=4)


def test_close_frees_all_sequences_of_all_prompts(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        params = greedy(200, n=2)
        watch.stop_at(decodes(engine, 8))
        stream = engine.submit([EngineRequest(prompt_of(5, i), params, first_index=2 * i) for i in range(6)])
        await watch.stopped()
        stream.close()
        watch.let_go()
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().cancelled_sequences == 12
        assert engine.stats().wasted_tokens == 0

    run_with_engine(scenario, model)


def test_closing_twice_or_after_the_end_is_harmless(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = engine.submit([endless(engine)])
        await anext(stream)
        stream.close()
        stream.close()
        ended = engine.submit([EngineRequest(prompt_of(5), greedy(3))])
        events = [event async for event in ended]
        ended.close()
        ended.close()
        assert events[-1].finish_reason is not None
        assert [event async for event in ended] == []
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().cancelled_sequences == 1

    run_with_engine(scenario, model, context=LONG)


def test_a_reader_that_waits_is_woken_by_close(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at()  # no event can come
        stream = engine.submit([endless(engine)])
        reader = asyncio.create_task(anext(stream, None))
        await watch.stopped()
        stream.close()
        assert await reader is None
        watch.let_go()

    run_with_engine(scenario, model)


def test_close_in_the_serial_engine_ends_the_answer_and_serves_the_next(model: PreTrainedModel, watch: Watch) -> None:
    expected = reference(model, prompt_of(9, 1), 12)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(200, n=2))])
        await anext(stream)
        await watch.stopped()
        queued = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
        queued.close()
        stream.close()
        watch.let_go()
        assert await tokens_of(engine, prompt_of(9, 1), greedy(12)) == expected
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().generation_tokens < 200

    run_with_engine(scenario, model, batcher=one_by_one(model))


@pytest.mark.long
def test_random_cancels_under_load_leave_nothing_behind(model: PreTrainedModel) -> None:
    chance = random.Random(5)
    loads = [(chance.randint(1, 40), chance.randint(1, 30), chance.choice([0, 0, 1, 3, 10, 99])) for _ in range(75)]
    expected = {length: reference(model, prompt_of(length, 1), 30) for length in {load[0] for load in loads}}

    async def one(engine: EngineCore, length: int, count: int, patience: int) -> bool:
        stream = engine.submit([EngineRequest(prompt_of(length, 1), greedy(count))])
        tokens: list[int] = []
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        if patience:
            async for event in stream:
                tokens.extend(event.token_ids)
                if len(tokens) >= patience:
                    break
        stream.close()
        assert tokens == expected[length][: len(tokens)]
        return len(tokens) == count

    async def scenario(engine: EngineCore) -> None:
        ended = 0
        for start in range(0, len(loads), 25):
            ended += sum(await asyncio.gather(*(one(engine, *load) for load in loads[start : start + 25])))
        assert 0 < ended < len(loads)  # some lived, some were cancelled
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().wasted_tokens == 0
        assert await tokens_of(engine, prompt_of(9, 1), greedy(8)) == reference(model, prompt_of(9, 1), 8)

    with running(model) as engine:
        run(scenario(engine))
        assert not engine._open
