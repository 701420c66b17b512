"""Requests that do not fit wait, requests that can never fit are refused, and every step keeps to the budget."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull
from mlserver_torch_stream.types import FinishReason, SamplingParameters
from tests.engine.tiny import (
    CONTEXT,
    VOCAB,
    Watch,
    collect,
    decodes,
    greedy,
    idle,
    prompt_of,
    reference,
    run,
    run_with_engine,
    running,
    tokens_of,
    until,
)


def bytes_for(model: PreTrainedModel, sequences: int, length: int) -> int:
    """The bytes that ``sequences`` sequences of ``length`` tokens need, in pages of four tokens."""
    with torch.inference_mode():
        spec = check_batching(model).spec
    assert spec is not None
    return sequences * replace(spec, page_size=4).sequence_bytes(length)


@pytest.mark.long
def test_a_small_budget_makes_requests_wait_and_is_never_exceeded(model: PreTrainedModel, watch: Watch) -> None:
    requests = [(prompt_of(10 + i, i), 20 - i) for i in range(8)]
    expected = [reference(model, prompt, count) for prompt, count in requests]
    budget = bytes_for(model, 2, length=32)
    seen: list[EngineStats] = []

    async def scenario(engine: EngineCore) -> list[list[int]]:
        watch.fail = lambda ids: seen.append(engine.stats())
        sequences = await asyncio.gather(*(tokens_of(engine, prompt, greedy(count)) for prompt, count in requests))
        await until(lambda: idle(engine), "an idle engine")
        return list(sequences)

    with running(model, cache_bytes=budget) as engine:
        assert run(scenario(engine)) == expected
    assert max(stats.running_sequences for stats in seen) >= 2  # two fit, and two there were
    assert max(stats.kv_cache_bytes for stats in seen) <= budget == seen[0].kv_cache_budget


def test_equal_requests_start_in_the_order_of_arrival(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        await asyncio.gather(*(tokens_of(engine, prompt_of(6, i), greedy(5)) for i in range(12)))

    run_with_engine(scenario, model, max_num_seqs=2, prefill_tokens=100)
    expected = [prompt_of(6, i) for i in range(12)]
    assert [tuple(ids) for call in watch.calls for ids in call if tuple(ids) in expected] == expected


def test_rows_never_exceed_the_bound_whatever_n_is(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        streams = [collect(engine, [EngineRequest(prompt_of(4, i), greedy(6, n=1 + i % 3))]) for i in range(10)]
        for number, events in enumerate(await asyncio.gather(*streams)):
            assert len(events) == 1 + number % 3

    run_with_engine(scenario, model, max_num_seqs=4)
    assert max(len(step) for step in watch.steps) == 4


@pytest.mark.parametrize(
    ("refused", "field"),
    [
        (EngineRequest(()), "text_input"),
        (EngineRequest(prompt_of(CONTEXT)), "text_input"),
        (EngineRequest((5, VOCAB)), "text_input"),
        (EngineRequest((5, -1)), "text_input"),
        (EngineRequest(prompt_of(5), greedy(5, n=9)), "n"),
        (EngineRequest(prompt_of(5), greedy(5, n=9), open=True), "n"),
    ],
    ids=["empty", "as long as the context", "id beyond the vocabulary", "negative id", "n beyond the rows", "open n"],
)
def test_what_can_never_run_is_refused_by_name_before_the_engine_sees_it(
    model: PreTrainedModel, watch: Watch, refused: EngineRequest, field: str
) -> None:
    async def scenario(engine: EngineCore) -> None:
        running_one = engine.submit([EngineRequest(prompt_of(5), greedy(40))])
        await anext(running_one)
        with pytest.raises(InvalidInput) as caught:
            engine.submit([EngineRequest(prompt_of(5), greedy(5)), refused] if not refused.open else [refused])
        assert caught.value.field == field
        tokens = [token async for event in running_one for token in event.token_ids]
        assert tokens == expected[-len(tokens) :]  # the one that runs noticed nothing

    expected = reference(model, prompt_of(5), 40)
    watch.calls.clear()
    with running(model) as engine:
        prefilled = len(watch.calls)
        run(scenario(engine))
        assert engine.stats().prefill_tokens == 5
    assert all(len(call) == 1 for call in watch.calls[prefilled:])


def test_n_rows_that_the_cache_never_holds_are_refused(model: PreTrainedModel) -> None:
    """A prompt that comes in pieces is refused at the piece that exceeds the cache.

    It would otherwise never be admitted.
    """

    async def scenario(engine: EngineCore) -> None:
        opened = engine.submit([EngineRequest((), greedy(30, n=4), open=True)])
        opened.extend(prompt_of(20))
        for refused in (
            lambda: engine.submit([EngineRequest(prompt_of(100), greedy(100, n=4))]),
            lambda: opened.extend(prompt_of(90)),
        ):
            with pytest.raises(InvalidInput, match="can never run") as caught:
                refused()
            assert caught.value.field == "n"
        opened.close()
        longest = engine.info.max_model_len
        assert len(await tokens_of(engine, prompt_of(longest - 1), SamplingParameters(ignore_eos=True))) == 1

    budget = bytes_for(model, 1, length=200)
    with running(model, cache_bytes=budget) as engine:
        assert 190 <= engine.info.max_model_len < CONTEXT
        run(scenario(engine))


@pytest.mark.long
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "in pieces"])
def test_rows_without_a_bound_end_where_the_cache_is_full(model: PreTrainedModel, pieces: bool) -> None:
    async def scenario(engine: EngineCore) -> None:
        unbounded = SamplingParameters(ignore_eos=True, n=3)
        for prompt in (prompt_of(20), prompt_of(90)):
            stream = engine.submit([EngineRequest(() if pieces else prompt, unbounded, open=pieces)])
            if pieces:
                stream.extend(prompt)
                stream.seal(prompt)
            events = [event async for event in stream]
            reasons = [event.finish_reason for event in events if event.finish_reason is not None]
            assert reasons == [FinishReason.LENGTH] * 3
            lengths = {event.usage.num_output_tokens + len(prompt) for event in events if event.usage is not None}
            assert len(lengths) == 1 and 100 <= lengths.pop() < engine.info.max_model_len

    with running(model, cache_bytes=bytes_for(model, 3, length=100)) as engine:
        assert engine.info.max_model_len == CONTEXT
        run(scenario(engine))


@pytest.mark.long
def test_open_prompts_of_any_accepted_length_are_admitted(model: PreTrainedModel) -> None:
    """The test tries prompts in pieces whose lengths are close to the limit."""

    async def scenario(engine: EngineCore, whole: tuple[int, ...]) -> bool:
        stream = engine.submit([EngineRequest((), greedy(2, n=2), open=True)])
        try:
            stream.extend(whole[:-1])
            stream.seal(whole)
        except InvalidInput:
            stream.close()
            return False
        events = [event async for event in stream]
        assert {event.index for event in events} == {0, 1}
        return True

    with running(model, cache_bytes=bytes_for(model, 2, length=100)) as engine:
        accepted = [run(scenario(engine, prompt_of(length))) for length in range(185, 201)]
    assert accepted[0] and not accepted[-1]


def test_a_full_queue_is_said_so_and_recovers(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        first = engine.submit([EngineRequest(prompt_of(5), greedy(100))])
        await anext(first)
        await watch.stopped()  # also what the thread has not yet seen counts
        waiting = [engine.submit([EngineRequest(prompt_of(5, i), greedy(3))]) for i in range(3)]
        with pytest.raises(QueueFull):
            engine.submit([EngineRequest(prompt_of(5), greedy(3))])
        watch.let_go()
        first.close()
        for stream in waiting:
            assert [event async for event in stream][-1].finish_reason is not None
        assert len(await tokens_of(engine, prompt_of(5), greedy(3))) == 3

    run_with_engine(scenario, model, max_num_seqs=1, max_queued_requests=3)


def test_prompts_that_the_thread_has_not_seen_yet_count_with_their_tokens(model: PreTrainedModel, watch: Watch) -> None:
    """A burst of long prompts may arrive within a single long step."""

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        first = engine.submit([EngineRequest(prompt_of(5), greedy(100))])
        await anext(first)
        await watch.stopped()
        waiting = [engine.submit([EngineRequest(prompt_of(40, i), greedy(3))]) for i in range(2)]
        with pytest.raises(QueueFull, match="prompt tokens"):
            engine.submit([EngineRequest(prompt_of(40), greedy(3))])
        watch.let_go()
        first.close()
        for stream in waiting:
            assert [event async for event in stream][-1].finish_reason is not None
        assert len(await tokens_of(engine, prompt_of(90), greedy(3))) == 3  # nothing is left of them

    run_with_engine(scenario, model, max_num_seqs=1, max_queued_tokens=100)


def test_who_is_being_prefilled_does_not_count_as_waiting(model: PreTrainedModel, watch: Watch) -> None:
    """This holds even while the step that admitted the request is still running, since a step may be long."""

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at()
        streams = [engine.submit([EngineRequest(prompt_of(30), greedy(3))])]
        await watch.stopped()
        streams.append(engine.submit([EngineRequest(prompt_of(5), greedy(3))]))
        with pytest.raises(QueueFull):
            engine.submit([EngineRequest(prompt_of(5), greedy(3))])
        watch.let_go()
        for stream in streams:
            assert [event async for event in stream][-1].finish_reason is not None

    run_with_engine(scenario, model, max_num_seqs=1, max_queued_requests=1)


def test_after_shutdown_nothing_is_accepted(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        with pytest.raises(NotServing):
            engine.submit([EngineRequest(prompt_of(5), greedy(3))])

    with running(model) as engine:
        engine.shutdown()
        assert not engine.alive
        run(scenario(engine))
