"""What a reader is told: whole characters, in order, merged when it lags."""

import asyncio
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import PromptJob
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.worker import EngineWorker
from mlserver_torch_stream.types import SamplingParameters, TokenEvent
from tests.engine.tiny import (
    EOS,
    Watch,
    byte_tokenizer,
    dictated,
    greedy,
    prompt_of,
    run,
    running,
    spelled,
    tiny_model,
    until,
    watched,
)

CODEC = TextCodec(byte_tokenizer())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def watch(model: PreTrainedModel) -> Iterator[Watch]:
    with watched(model) as watch:
        yield watch


async def events_of(engine: EngineWorker, prompt: tuple[int, ...], params: SamplingParameters) -> list[TokenEvent]:
    return [event async for event in engine.submit([PromptJob(prompt, params)])]


@pytest.mark.parametrize("skip", [True, False])
def test_the_events_join_to_the_decode_of_all_tokens(model: PreTrainedModel, skip: bool) -> None:
    async def scenario(engine: EngineWorker) -> None:
        params = [
            SamplingParameters(
                max_tokens=60,
                temperature=1.5,
                seed=seed,
                ignore_eos=True,
                skip_special_tokens=skip,
                logit_bias={EOS: 2.0},  # special tokens in the middle
            )
            for seed in range(8)
        ]
        for events in await asyncio.gather(*(events_of(engine, prompt_of(5), each) for each in params)):
            tokens = [token for event in events for token in event.token_ids]
            assert len(tokens) == 60
            assert "".join(event.text for event in events) == CODEC.decode(tokens, skip)
            assert any("\N{REPLACEMENT CHARACTER}" in event.text for event in events)  # it was mostly no UTF-8
            for event in events[:-1]:
                assert event.finish_reason is None and event.usage is None and event.text
            assert events[-1].finish_reason is not None and events[-1].usage is not None

    with running(model) as engine:
        run(scenario(engine))


def test_no_event_splits_a_character(model: PreTrainedModel) -> None:
    said = "Ünïcödé 日本語 🙂🚀 €"
    ids = spelled(said)
    with running(model) as engine, dictated(model, ids, prompt=5):
        events = run(events_of(engine, prompt_of(5), greedy(len(ids))))
    assert "".join(event.text for event in events) == said
    assert not any("\N{REPLACEMENT CHARACTER}" in event.text for event in events)
    assert len(events) > len(said) // 2


def test_a_reader_that_lags_gets_fewer_events_and_the_same_text(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineWorker) -> None:
        params = SamplingParameters(max_tokens=100, ignore_eos=True, logprobs=True, n=2)
        prompt = engine.submit([PromptJob(prompt_of(5), params)])
        prompt_events = [event async for event in prompt]
        late = engine.submit([PromptJob(prompt_of(5), params)])
        await until(lambda: engine.stats().generated_tokens == 400, "the end of the answers")
        await until(lambda: all(event.finish_reason for event in late._pending.values()), "its delivery")
        assert len(late._pending) == 2  # one event per sequence, however much there is to say
        late_events = [event async for event in late]
        assert len(late_events) == 2 < len(prompt_events)
        for event in late_events:
            own = [each for each in prompt_events if each.index == event.index]
            assert event.text == "".join(each.text for each in own)
            assert event.token_ids == tuple(token for each in own for token in each.token_ids)
            assert event.logprobs == tuple(entry for each in own for entry in each.logprobs)
            assert (event.finish_reason, event.cumulative_logprob) == (
                own[-1].finish_reason,
                own[-1].cumulative_logprob,
            )

    with running(model) as engine:
        run(scenario(engine))


def test_the_engine_does_not_wait_for_a_reader(model: PreTrainedModel) -> None:
    """One stream is never read; another one ends all the same, and so does the first."""

    async def scenario(engine: EngineWorker) -> None:
        unread = engine.submit([PromptJob(prompt_of(5), greedy(150))])
        assert len(await events_of(engine, prompt_of(6), greedy(50))) > 1
        await until(lambda: engine.stats().running_rows == 0, "the end of both")
        assert engine.stats().generated_tokens == 200
        unread.close()

    with running(model) as engine:
        run(scenario(engine))


def test_every_event_suspends_its_reader(model: PreTrainedModel) -> None:
    """Also with events at hand: a reader that never waits would hold up all other tasks of its loop."""

    async def scenario(engine: EngineWorker) -> None:
        stream = engine.submit([PromptJob(prompt_of(5, i), greedy(3), first_index=i) for i in range(8)])
        await until(lambda: len(stream._pending) == 8 and engine.stats().running_rows == 0, "eight events")
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        read = [event async for event in stream]
        task.cancel()
        assert turns >= len(read)

    with running(model) as engine:
        run(scenario(engine))


def test_one_step_of_a_batch_wakes_the_loop_once(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineWorker) -> None:
        loop = asyncio.get_running_loop()
        calls = 0
        original = loop.call_soon_threadsafe

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)  # type: ignore[arg-type]

        streams = [engine.submit([PromptJob(prompt_of(5, i), greedy(100))]) for i in range(8)]
        await until(lambda: engine.stats().running_rows == 8, "a batch")
        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        before = engine.stats().decode_steps
        await until(lambda: engine.stats().running_rows == 0, "the end")
        assert 0 < calls <= engine.stats().decode_steps - before + 1
        for stream in streams:
            stream.close()

    with running(model) as engine:
        run(scenario(engine))
