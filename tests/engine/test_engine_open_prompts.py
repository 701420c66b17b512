"""A prompt that comes in pieces waits until it is complete, and is answered as if it had come at once."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.errors import InvalidInput, QueueFull
from mlserver_torch_stream.types import FinishReason, SamplingParameters
from tests.engine.tiny import (
    CONTEXT,
    VOCAB,
    greedy,
    idle,
    one_by_one,
    prompt_of,
    reference,
    run,
    run_with_engine,
    running,
    tiny_model,
    tokens_of,
    until,
)

GREEDY = greedy(12)


def opened(engine: EngineCore, params: SamplingParameters = GREEDY) -> Mailbox:
    return engine.submit([EngineRequest((), params, open=True)])


async def rest(stream: Mailbox) -> list[int]:
    events = [event async for event in stream]
    assert events[-1].error is None
    return [token for event in events if event.index == events[0].index for token in event.token_ids]


def cut(ids: Sequence[int], chance: random.Random) -> list[Sequence[int]]:
    cuts = sorted(chance.choices(range(len(ids) + 1), k=4))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_pieces_give_the_tokens_of_the_whole(family: str) -> None:
    model = tiny_model(family)
    chance = random.Random(3)
    prompts = [prompt_of(length, length) for length in (1, 2, 9, 40)]
    expected = [reference(model, prompt, 12) for prompt in prompts]

    async def one(engine: EngineCore, prompt: tuple[int, ...]) -> list[int]:
        stream = opened(engine)
        for chunk in cut(prompt, chance):
            stream.extend(chunk)
            await asyncio.sleep(chance.random() * 0.005)
        stream.seal(prompt)
        return await rest(stream)

    async def scenario(engine: EngineCore) -> None:
        closed = tokens_of(engine, prompts[3], greedy(12))  # an ordinary one among them
        got = await asyncio.gather(*(one(engine, prompt) for prompt in prompts), closed)
        assert got == [*expected, expected[3]]
        await until(lambda: idle(engine), "an idle engine")

    run_with_engine(scenario, model)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize(
    "whole",
    [prompt_of(50), (*prompt_of(15), *prompt_of(9, 4)), prompt_of(7), prompt_of(33, 5)],
    ids=["a longer one", "another middle", "a shorter one", "something else"],
)
def test_nothing_is_computed_of_the_pieces_and_the_whole_need_not_begin_with_them(
    family: str, whole: tuple[int, ...]
) -> None:
    model = tiny_model(family)
    expected = reference(model, whole, 12)

    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine, greedy(12, n=2))
        stream.extend(prompt_of(30))
        await tokens_of(engine, prompt_of(3, 7), greedy(2))
        assert engine.stats().prefill_tokens == 3 and engine.stats().kv_cache_bytes == 0
        stream.seal(whole)
        assert await rest(stream) == expected
        assert engine.stats().prefill_tokens == 3 + len(whole)
        await until(lambda: idle(engine), "an idle engine")

    run_with_engine(scenario, model)


def test_too_long_or_foreign_pieces_are_refused_when_they_come(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        stream.extend(prompt_of(CONTEXT - 1))
        for more in ((1,), (1, 2, 3)):
            with pytest.raises(InvalidInput) as caught:
                stream.extend(more)
            assert caught.value.field == "text_input"
        stream.close()
        stream = opened(engine)
        for foreign in ((VOCAB,), (-1,)):
            with pytest.raises(InvalidInput):
                stream.extend(foreign)
        for whole in ((), prompt_of(CONTEXT), (VOCAB,)):
            with pytest.raises(InvalidInput):
                stream.seal(whole)
        stream.close()
        await until(lambda: idle(engine), "an idle engine")

    run_with_engine(scenario, model)


def test_only_an_open_stream_takes_pieces_and_only_until_it_is_sealed(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        stream.seal(prompt_of(3))
        for late in (stream, engine.submit([EngineRequest(prompt_of(3), GREEDY)])):
            with pytest.raises(ValueError):
                late.extend((1,))
            late.close()
        with pytest.raises(ValueError):
            engine.submit([EngineRequest((), GREEDY, open=True), EngineRequest(prompt_of(3), GREEDY)])

    run_with_engine(scenario, model)


def test_the_longest_prompt_fits_in_pieces(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        for start in range(0, CONTEXT - 1, 50):
            stream.extend(prompt_of(CONTEXT - 1)[start : start + 50])
        stream.seal(prompt_of(CONTEXT - 1))
        events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert events[-1].usage is not None and events[-1].usage.num_output_tokens == 1

    run_with_engine(scenario, model)


@pytest.mark.parametrize("chunks", [(), prompt_of(30)], ids=["before its first piece", "after one"])
def test_close_of_an_open_prompt_frees_everything(model: PreTrainedModel, chunks: tuple[int, ...]) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        stream.extend(chunks)
        assert engine.stats().open_prompts == 1
        stream.close()
        await until(lambda: idle(engine) and engine.stats().open_prompts == 0, "an idle engine")
        assert engine.stats().cancelled_sequences == 1

    with running(model) as engine:
        run(scenario(engine))
        assert not engine._open


def test_an_idle_open_prompt_costs_no_processor_time_and_holds_nobody_up(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        stream.extend(prompt_of(10))
        assert await tokens_of(engine, prompt_of(9, 1), greedy(12)) == reference(model, prompt_of(9, 1), 12)
        clock = time.pthread_getcpuclockid(engine._thread.ident or 0)
        before = time.clock_gettime(clock)
        await asyncio.sleep(0.3)
        assert time.clock_gettime(clock) - before < 0.02
        stream.seal(prompt_of(10))
        assert await rest(stream) == reference(model, prompt_of(10), 12)

    run_with_engine(scenario, model)


def test_in_the_serial_engine_an_open_prompt_holds_nobody_up(model: PreTrainedModel) -> None:
    """Many other requests come and go before the prompt is sealed."""
    expected = reference(model, prompt_of(6), 3)

    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        stream.extend(prompt_of(4))
        for _ in range(40):
            assert await tokens_of(engine, prompt_of(6), greedy(3)) == expected
        stream.extend(prompt_of(6)[4:])
        stream.seal(prompt_of(6))
        assert (await rest(stream))[:3] == expected
        left = opened(engine)
        left.close()
        await until(lambda: idle(engine), "an idle engine")

    with running(model, batcher=one_by_one(model)) as engine:
        run(scenario(engine))


@pytest.mark.long
def test_paused_prompts_take_no_place_and_no_memory_that_others_need(model: PreTrainedModel) -> None:
    """There are as many paused prompts as places, and they are long enough to fill the cache."""
    prompt, long = prompt_of(9, 1), prompt_of(150, 2)
    expected, expected_long = reference(model, prompt, 12), reference(model, long, 12)

    async def scenario(engine: EngineCore) -> None:
        paused = [opened(engine) for _ in range(4)]
        for stream in paused:
            stream.extend(long[:149])
        sequences = await asyncio.gather(*(tokens_of(engine, prompt, greedy(12)) for _ in range(6)))
        assert sequences == [expected] * 6
        assert await tokens_of(engine, long, greedy(12)) == expected_long
        assert engine.stats().open_prompts == 4
        for stream in paused:
            stream.seal(long)
        assert await asyncio.gather(*(rest(stream) for stream in paused)) == [expected_long] * 4
        await until(lambda: idle(engine), "an idle engine")

    run_with_engine(scenario, model, max_num_seqs=2, cache_bytes=one_sequence(model, CONTEXT))


def test_a_prompt_that_has_grown_beyond_the_cache_is_refused_at_that_piece(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine, greedy(50, n=4))
        stream.extend(prompt_of(20))  # that and four times 50 tokens fit
        with pytest.raises(InvalidInput, match="can never run"):
            stream.extend(prompt_of(100))
        stream.close()
        await until(lambda: idle(engine), "an idle engine")

    run_with_engine(scenario, model, cache_bytes=one_sequence(model, CONTEXT))


def test_open_prompts_are_bounded_and_leave_the_queue_to_others(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        paused = [opened(engine) for _ in range(3)]
        await until(lambda: engine.stats().open_prompts == 3, "three prompts")
        with pytest.raises(QueueFull, match="in pieces"):
            opened(engine)
        await asyncio.gather(*(tokens_of(engine, prompt_of(9), greedy(4)) for _ in range(3)))
        for stream in paused:
            stream.close()
        await until(lambda: engine.stats().open_prompts == 0, "their end")
        opened(engine).close()

    run_with_engine(scenario, model, max_queued_requests=3)


def test_the_time_in_the_queue_begins_when_the_prompt_is_whole(model: PreTrainedModel) -> None:
    """The time that a slow sender needs is not time in the queue."""

    async def scenario(engine: EngineCore) -> None:
        stream = opened(engine)
        stream.extend(prompt_of(10))
        await asyncio.sleep(1.2)
        stream.seal(prompt_of(20))
        events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert events[-1].usage is not None and events[-1].usage.queue_s < 1 < events[-1].usage.ttft_s

    run_with_engine(scenario, model, queue_timeout=1.0)


def one_sequence(model: PreTrainedModel, length: int) -> int:
    """The bytes of cache that a single sequence of ``length`` tokens needs."""
    spec = check_batching(model).spec
    assert spec is not None
    return replace(spec, page_size=4).sequence_bytes(length)
