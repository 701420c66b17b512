"""An error in the model fails only the requests concerned; if the thread dies, all streams end with an error."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats, Mailbox
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduler.scheduler import Scheduler
from mlserver_torch_stream.engine.step.batcher import DeadBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import GenerationFailed, NotServing
from mlserver_torch_stream.types import FinishReason, SamplingParameters, TokenEvent
from tests.engine.tiny import (
    VOCAB,
    Watch,
    byte_tokenizer,
    collect,
    decodes,
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
    watched,
)
from tests.engine.tiny_tokenizers import fused_byte_level

POISON = 251  # no prompt of ``prompt_of`` holds it


def raise_on(token: int) -> Callable[[list[list[int]]], BaseException | None]:
    return lambda ids: RuntimeError("poisoned") if any(token in row for row in ids) else None


def forced(count: int, token: int) -> SamplingParameters:
    """Forces every token of the answer to be ``token``."""
    return greedy(count, logit_bias={token: 1e6})


async def failed(engine: EngineCore, prompt: tuple[int, ...], params: SamplingParameters) -> TokenEvent:
    event = (await collect(engine, [EngineRequest(prompt, params)]))[0]
    assert event.finish_reason is FinishReason.ERROR
    assert isinstance(event.error, GenerationFailed)
    assert event.usage is not None
    return event


def test_a_stop_that_comes_while_the_inbox_is_emptied_is_not_slept_through(model: PreTrainedModel) -> None:
    gate = threading.Event()

    def stop() -> None:
        engine._stopping = True
        engine._inbox.post(lambda: None)  # taken in at once, by the loop that runs this

    with running(model) as engine:
        engine._inbox.post(lambda: gate.wait(30) or None)
        engine._inbox.post(stop)
        gate.set()
        engine._thread.join(30)
        assert not engine._thread.is_alive()


def test_a_thread_that_does_not_come_back_is_not_waited_for(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at()
        running_stream = engine.submit([EngineRequest(prompt_of(9), greedy(50))])
        await watch.stopped()
        waiting_stream = engine.submit([EngineRequest(prompt_of(9), greedy(50))])
        engine.fail(RuntimeError("lost"), patience=0.05)
        for stream in (running_stream, waiting_stream):
            events = [event async for event in stream]
            assert [event.finish_reason for event in events[-1:]] == [FinishReason.ERROR]
            assert "RuntimeError" in str(events[-1].error)
        assert not engine.alive
        assert engine._thread.is_alive(), "it is still held"
        with pytest.raises(NotServing):
            engine.submit([EngineRequest(prompt_of(3))])
        watch.let_go()
        engine._thread.join(30)
        assert not engine._thread.is_alive()
        assert not engine._inbox.post(lambda: None), "nobody would take it in"

    run_with_engine(scenario, model)


def test_a_thread_that_comes_back_in_time_is_left_to_itself(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        dead = engine._batcher
        engine.fail(RuntimeError("once"), patience=30)
        await until(lambda: engine._batcher is not dead and engine.trouble is None, "the end of the restart")
        expected = reference(model, prompt_of(5), 4)
        assert await tokens_of(engine, prompt_of(5), greedy(4)) == expected

    run_with_engine(scenario, model, rebuild=lambda deaths: one_by_one(model))


async def settled(engine: EngineCore) -> None:
    await until(lambda: idle(engine), "an idle engine")


def test_a_prefill_that_raises_fails_its_request_alone(model: PreTrainedModel, watch: Watch) -> None:
    expected = reference(model, prompt_of(9, 1), 30)

    async def scenario(engine: EngineCore) -> None:
        watch.fail = raise_on(POISON)
        other = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), greedy(30)))
        for prompt in ((POISON,), (*prompt_of(13), POISON), (*prompt_of(6), POISON, *prompt_of(20))):
            event = await failed(engine, prompt, greedy(5))
            assert event.token_ids == ()
            assert "failed: RuntimeError; the server's log" in str(event.error) and "poisoned" not in str(event.error)
        assert await other == expected
        assert await tokens_of(engine, prompt_of(9, 1), greedy(30)) == expected
        await settled(engine)

    run_with_engine(scenario, model)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("lfm2", marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma2", "bloom")),
    ],
)
def test_a_decode_step_that_raises_fails_the_culprit_alone(family: str) -> None:
    model = tiny_model(family)
    requests = [(prompt_of(4 + 3 * i, i), 80 + i) for i in range(5)]
    expected = [reference(model, prompt, count) for prompt, count in requests]
    taken = {token for (prompt, _), answer in zip(requests, expected, strict=True) for token in (*prompt, *answer)}
    poison = min(set(range(VOCAB)) - taken)

    async def scenario(engine: EngineCore, watch: Watch) -> None:
        watch.fail = raise_on(poison)
        watch.stop_at(decodes(engine, len(requests)))
        others = [asyncio.create_task(tokens_of(engine, prompt, greedy(count))) for prompt, count in requests]
        await watch.stopped()
        prompts = requests[0][0][:2], requests[3][0]
        culprits = [asyncio.create_task(failed(engine, prompt, forced(10, poison))) for prompt in prompts]
        await asyncio.sleep(0)  # they are submitted
        watch.let_go()
        for culprit in culprits:
            event = await culprit
            assert event.token_ids == (poison,)  # chosen by the prefill; the step that takes it in raises
            assert "failed: RuntimeError; the server's log" in str(event.error) and "poisoned" not in str(event.error)
        assert [await other for other in others] == expected
        await settled(engine)

    with running(model) as engine, watched(model) as watch:
        run(scenario(engine, watch))


def test_the_culprit_among_sixteen_is_found_in_eight_forwards(model: PreTrainedModel, watch: Watch) -> None:
    prompts = [prompt_of(4, seed) for seed in range(16)]
    expected = [reference(model, prompt, 3) for prompt in prompts]
    poison = min(set(range(VOCAB)) - {token for ids in (*prompts, *expected) for token in ids})
    answers = [greedy(3)] * 5 + [forced(3, poison)] + [greedy(3)] * 10
    requests = [EngineRequest(*each, index) for index, each in enumerate(zip(prompts, answers, strict=True))]

    async def scenario(engine: EngineCore) -> None:
        watch.calls.clear()
        watch.fail = raise_on(poison)
        events = await collect(engine, requests)
        assert events.pop(5).finish_reason is FinishReason.ERROR
        assert all(list(event.token_ids) == expected[index] for index, event in events.items())
        prefill, *steps = [len(call) for call in watch.calls]
        assert prefill == 16 and steps == [16, 8, 4, 4, 2, 1, 1, 2, 8, 15]

    run_with_engine(scenario, model, max_num_seqs=16, prefill_tokens=64)


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("lfm2", marks=pytest.mark.long), pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_nan_fails_its_row_alone_and_leaves_no_trace_in_the_slot(family: str) -> None:
    model = tiny_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    requests = [(prompt_of(5 + 4 * i, i), 30) for i in range(3)]
    expected = [reference(model, prompt, count) for prompt, count in requests]

    async def scenario(engine: EngineCore) -> None:
        others = [asyncio.create_task(tokens_of(engine, prompt, greedy(count))) for prompt, count in requests[:2]]
        for seed in range(4):
            event = await failed(engine, prompt_of(25, seed), forced(10, POISON))  # NaN in a decode step
            assert event.token_ids == (POISON,)
            event = await failed(engine, (*prompt_of(9, seed), POISON), greedy(5))  # and in a prefill
            assert event.token_ids == ()
            # A short row in the same slot: what is masked there is multiplied by zero, which NaN survives.
            assert await tokens_of(engine, prompt_of(3, seed), greedy(4)) == short[seed]
        assert [await other for other in others] == expected[:2]
        assert await tokens_of(engine, *requests[2][:1], greedy(30)) == expected[2]
        await settled(engine)

    short = [reference(model, prompt_of(3, seed), 4) for seed in range(4)]
    run_with_engine(scenario, model)


def test_a_step_that_fails_for_all_ends_them_and_the_next_request_is_served(
    model: PreTrainedModel, watch: Watch
) -> None:
    expected = reference(model, prompt_of(9, 1), 12)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 4))
        streams = [
            asyncio.create_task(collect(engine, [EngineRequest(prompt_of(5, i), greedy(200))])) for i in range(4)
        ]
        await watch.stopped()
        watch.fail = lambda ids: RuntimeError("out of order")
        watch.let_go()
        for stream in streams:
            assert (await stream)[0].finish_reason is FinishReason.ERROR
        watch.fail = lambda ids: None
        assert await tokens_of(engine, prompt_of(9, 1), greedy(12)) == expected
        await settled(engine)

    run_with_engine(scenario, model)


@pytest.mark.long
def test_a_step_that_fails_only_for_the_whole_batch_ends_nobody(model: PreTrainedModel, watch: Watch) -> None:
    """Running out of memory is such a failure: each row fits when it runs alone."""
    expected = [reference(model, prompt_of(5, i), 60) for i in range(4)]

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 4))
        streams = [asyncio.create_task(tokens_of(engine, prompt_of(5, i), greedy(60))) for i in range(4)]
        await watch.stopped()
        watch.fail = lambda ids: RuntimeError("no memory") if len(ids) > 1 else None
        watch.let_go()
        assert [await stream for stream in streams] == expected
        await settled(engine)

    run_with_engine(scenario, model)


def test_no_memory_for_the_pages_of_the_first_step_ends_its_requests_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocation itself fails, between two layers."""
    expected = reference(model, prompt_of(9, 1), 12)
    pool, calls = LayerPages._pool, 0

    def scarce(self: LayerPages, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (3, 4):
            raise torch.OutOfMemoryError("no memory")
        return pool(self, *args)

    async def scenario(engine: EngineCore) -> None:
        monkeypatch.setattr(LayerPages, "_pool", scarce)  # the check at load has run
        event = await failed(engine, prompt_of(30, 3), greedy(10))
        assert "out of memory" in str(event.error)
        await failed(engine, prompt_of(30, 4), greedy(10))
        assert await tokens_of(engine, prompt_of(9, 1), greedy(12)) == expected
        await settled(engine)

    run_with_engine(scenario, model)
    assert calls > 4


def test_who_shares_the_pages_of_a_failed_prompt_is_computed_again(model: PreTrainedModel, watch: Watch) -> None:
    """Two prompts with the same beginning come in one step: the second reads pages that the first one writes."""
    shared = prompt_of(40, 3)
    expected = reference(model, (*shared, 7), 12)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        blocker = asyncio.create_task(tokens_of(engine, prompt_of(5), greedy(40)))
        await watch.stopped()
        first = asyncio.create_task(collect(engine, [EngineRequest((*shared, POISON), greedy(12))]))
        second = asyncio.create_task(tokens_of(engine, (*shared, 7), greedy(12)))
        await asyncio.sleep(0)  # they are submitted
        watch.fail = raise_on(POISON)
        watch.let_go()
        assert (await first)[0].finish_reason is FinishReason.ERROR
        assert await second == expected
        await blocker
        await settled(engine)

    run_with_engine(scenario, model, prefill_tokens=512, prefix_bytes=2**20)
    together = [call for call in watch.calls if any(POISON in ids for ids in call)]
    assert max(len(call) for call in together) > 1


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_who_shares_the_pages_of_a_prompt_with_nan_is_computed_again(family: str) -> None:
    """These forwards make the tokens before a NaN wrong, too. The third prompt reads them in a step that needs none of
    its logits.

    The first prompt is admitted before the others, since it has the least work.
    """
    model = tiny_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    shared = prompt_of(40, 3)
    prompts = [(*shared, 7), (*shared, *prompt_of(120, 4))]
    expected = [reference(model, prompt, 12) for prompt in prompts]

    async def scenario(engine: EngineCore, watch: Watch) -> None:
        watch.stop_at(decodes(engine, 1))
        blocker = asyncio.create_task(tokens_of(engine, prompt_of(5), greedy(40)))
        await watch.stopped()
        first = asyncio.create_task(collect(engine, [EngineRequest((*shared, POISON), greedy(3, n=2))]))
        others = [asyncio.create_task(tokens_of(engine, prompt, greedy(12))) for prompt in prompts]
        await asyncio.sleep(0)  # they are submitted
        watch.let_go()
        assert [event.finish_reason for event in (await first).values()] == [FinishReason.ERROR] * 2
        assert [await other for other in others] == expected
        await blocker
        await settled(engine)

    with running(model, prefill_tokens=100, prefix_bytes=2**20) as engine, watched(model) as watch:
        run(scenario(engine, watch))
    together = [call for call in watch.calls if any(POISON in ids for ids in call)]
    assert max(len(call) for call in together) > 3 or family == "bloom"  # which runs each prompt by itself


@pytest.mark.parametrize("family", ["llama", pytest.param("lfm2", marks=pytest.mark.long)])
def test_answers_to_one_prompt_survive_the_failure_of_the_step_in_which_they_part(family: str) -> None:
    """The failed step was to copy the page or the states with which each answer continues."""
    model = tiny_model(family)
    request = EngineRequest(prompt_of(6), greedy(12, n=3, temperature=1.0, seed=3))
    forward, failed_once = ModelForward(model, check_batching(model).way), threading.Event()
    copying: list[Batch] = []

    def fail_once(batch: Batch, cache: PagedCache) -> Logits:
        logits = forward(batch, cache)
        if batch.copies or batch.state_copies:
            copying.append(batch)
            if len(batch.sequences) == 3 and not failed_once.is_set():
                failed_once.set()
                raise RuntimeError("once")
        return logits

    with running(model) as engine:
        expected = run(collect(engine, [request]))
        assert engine.stats().prefill_tokens == 6  # nothing is computed twice without a failure
    with running(model, forward=fail_once) as engine:
        got = run(collect(engine, [request]))
    assert failed_once.is_set() and len(copying) == 1
    assert {index: event.token_ids for index, event in got.items()} == {
        index: event.token_ids for index, event in expected.items()
    }


def test_a_step_after_a_failed_one_starts_from_the_same_cache(model: PreTrainedModel) -> None:
    """A middle layer raises once, when the layers before it have written to the cache and those behind it have not."""
    expected = [reference(model, prompt_of(6 + i, i), 20) for i in range(3)]
    batches = 0
    trial = False

    def fail_once(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Raises in one step of all three sequences, and then for the first sequence that is retried alone."""
        nonlocal batches, trial
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        if tokens == 3:
            batches += 1
            trial = batches == 3
            if trial:
                raise RuntimeError("once")
        elif tokens == 1 and trial:
            trial = False
            raise RuntimeError("the first one, when it is tried alone")

    async def scenario(engine: EngineCore) -> None:
        requests = [EngineRequest(prompt_of(6 + i, i), greedy(20), first_index=i) for i in range(3)]
        events = await collect(engine, requests)
        ends = [event.finish_reason for event in events.values()]
        assert ends.count(FinishReason.ERROR) == 1
        for index, event in events.items():
            assert list(event.token_ids) == expected[index][: len(event.token_ids)]
            assert event.finish_reason is FinishReason.ERROR or len(event.token_ids) == 20

    handle = model.model.layers[1].register_forward_pre_hook(fail_once, with_kwargs=True)
    try:
        run_with_engine(scenario, model)
    finally:
        handle.remove()


def test_sampling_that_raises_fails_its_row_alone(model: PreTrainedModel, watch: Watch) -> None:
    """No protocol accepts this temperature; the test uses it to cause an error in one row."""
    expected = reference(model, prompt_of(9, 1), 30)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        other = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), greedy(30)))
        await watch.stopped()
        bad = SamplingParameters(max_tokens=5, temperature="warm")  # type: ignore[arg-type]
        failing = asyncio.create_task(failed(engine, prompt_of(5), bad))
        await asyncio.sleep(0)  # it is submitted
        watch.let_go()
        event = await failing
        assert event.token_ids == ()
        assert await other == expected
        await settled(engine)

    run_with_engine(scenario, model)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, fused_byte_level])
def test_text_that_raises_fails_its_row_alone(
    tokenizer: Callable[[], PreTrainedTokenizerFast], model: PreTrainedModel, watch: Watch
) -> None:
    """The tokenizer may be anybody's code: if it cannot decode a token, only that answer fails.

    The test lets either the lookup of a token's bytes or ``decode`` raise.
    """
    expected = reference(model, prompt_of(9, 1), 30)

    async def scenario(engine: EngineCore) -> None:
        codec = engine._codec = TextCodec(tokenizer())
        token_bytes, decode = codec.token_bytes, codec.decode

        def picky_bytes(token_id: int) -> bytes:
            if token_id == POISON:
                raise ValueError("cannot spell that")
            return token_bytes(token_id)

        def picky_decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
            if POISON in ids:
                raise ValueError("cannot spell that")
            return decode(ids, skip_special_tokens)

        codec.token_bytes = picky_bytes  # type: ignore[method-assign]
        codec.decode = picky_decode  # type: ignore[method-assign]
        watch.stop_at(decodes(engine, 1))
        other = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), greedy(30)))
        await watch.stopped()
        failing = asyncio.create_task(failed(engine, prompt_of(5), forced(5, POISON)))
        await asyncio.sleep(0)  # it is submitted
        watch.let_go()
        event = await failing
        assert "ValueError" in str(event.error)
        assert await other == expected
        await settled(engine)

    run_with_engine(scenario, model)


def test_a_backend_that_cannot_even_let_go_still_ends_every_stream(
    model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even releasing the rows raises, and the streams must still end."""

    def broken(self: Scheduler, *args: Any, **options: Any) -> list[SequenceState]:
        raise torch.OutOfMemoryError("no memory")

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 4))
        streams = [engine.submit([EngineRequest(prompt_of(5, i), greedy(200))]) for i in range(4)]
        await watch.stopped()
        monkeypatch.setattr(Scheduler, "release", broken)
        streams[0].close()
        watch.let_go()
        for stream in streams[1:]:
            assert [event async for event in stream][-1].finish_reason is FinishReason.ERROR
        assert not engine.alive
        assert engine.stats().kv_cache_bytes == 0  # a dead engine holds no memory
        assert engine.stats().decode_steps > 0

    run_with_engine(scenario, model)


def test_a_dead_batcher_keeps_the_counters_and_holds_nothing() -> None:
    last = EngineStats(generation_tokens=3, kv_cache_budget=7, running_sequences=2, prefix_cache_bytes=5)
    assert DeadBatcher(last).stats == EngineStats(generation_tokens=3, kv_cache_budget=7)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_when_the_thread_dies_every_stream_is_told(model: PreTrainedModel, watch: Watch, where: str) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 8))
        streams = [engine.submit([EngineRequest(prompt_of(5, i), greedy(200, n=2))]) for i in range(6)]  # some wait
        opened = engine.submit([EngineRequest((), greedy(5), open=True)])
        await watch.stopped()
        late = engine.submit([EngineRequest(prompt_of(5), greedy(3))])  # not even taken from the inbox
        closed = engine.submit([EngineRequest(prompt_of(5), greedy(3))])
        closed.close()
        streams[0].close()
        decoding = where == "decode"
        watch.fail = lambda ids: SystemExit("the end") if any((len(row) == 1) == decoding for row in ids) else None
        watch.let_go()
        for stream in (*streams[1:], late, opened):
            ends = [event async for event in stream if event.finish_reason is not None]
            assert {end.index for end in ends} == ({0, 1} if stream in streams else {0})
            assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
            assert all("SystemExit" in str(end.error) for end in ends)
            stream.close()
        assert not engine.alive
        with pytest.raises(NotServing, match="SystemExit"):
            engine.submit([EngineRequest(prompt_of(5), greedy(3))])
        engine.shutdown()

    run_with_engine(scenario, model)


def test_a_submit_that_meets_the_end_of_the_thread_is_refused(model: PreTrainedModel) -> None:
    """The engine ends after it was found alive and before it gets the request, which nobody would answer."""

    class Late(tuple):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            engine.shutdown()
            return super().__iter__()

    async def scenario() -> None:
        with pytest.raises(NotServing):
            engine.submit([EngineRequest(Late(prompt_of(3)), greedy(2))])

    with running(model) as engine:
        run(scenario())


@pytest.mark.long
def test_no_submit_is_lost_while_the_thread_ends(model: PreTrainedModel) -> None:
    """Submits race with the end of the thread: each is refused or gets its last event, and none waits for ever."""

    async def scenario() -> None:
        for _ in range(15):
            with running(model, max_queued_requests=10_000) as engine:
                ending = asyncio.create_task(asyncio.to_thread(engine.shutdown))
                streams: list[Mailbox] = []
                try:
                    for _ in range(10_000):
                        streams.append(engine.submit([EngineRequest(prompt_of(3), greedy(2))]))
                        if len(streams) % 8 == 0:
                            await asyncio.sleep(0)
                except NotServing:
                    pass
                for stream in streams:
                    assert [event async for event in stream][-1].finish_reason is not None
                await ending

    run(scenario())


def test_shutdown_ends_streams_and_joins_the_thread(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 6))
        streams = [engine.submit([EngineRequest(prompt_of(5, i), greedy(200, n=3))]) for i in range(4)]
        await watch.stopped()
        ending = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await until(lambda: not engine.alive, "the call of shutdown")
        watch.let_go()
        await ending
        assert not engine._thread.is_alive()
        for stream in streams:
            ends = [event for event in [event async for event in stream] if event.finish_reason is not None]
            assert {end.index for end in ends} == {0, 1, 2}
            assert {end.finish_reason for end in ends} == {FinishReason.ABORT}
            assert all(isinstance(end.error, NotServing) for end in ends)

    run_with_engine(scenario, model)


def test_shutdown_does_not_wait_for_a_long_serial_answer(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(240))])
        await anext(stream)
        await watch.stopped()
        ending = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await until(lambda: not engine.alive, "the call of shutdown")
        watch.let_go()
        await ending
        tokens = 0
        async for event in stream:
            tokens += len(event.token_ids)
        assert event.finish_reason is FinishReason.ABORT
        assert tokens < 239

    run_with_engine(scenario, model, batcher=one_by_one(model))


def test_a_serial_answer_that_raises_fails_alone(model: PreTrainedModel, watch: Watch) -> None:
    expected = reference(model, prompt_of(9, 1), 12)

    async def scenario(engine: EngineCore) -> None:
        watch.fail = raise_on(POISON)
        waiting = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), greedy(12)))
        await failed(engine, (POISON, 3), greedy(5))
        event = await failed(engine, prompt_of(5), forced(5, POISON))
        assert event.token_ids == (POISON,)
        assert await waiting == expected

    run_with_engine(scenario, model, batcher=one_by_one(model))


def test_a_serial_answer_that_cannot_even_begin_fails_alone(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        bad = SamplingParameters(max_tokens=5, seed="none")  # type: ignore[arg-type]
        await failed(engine, prompt_of(5), bad)
        assert await tokens_of(engine, prompt_of(9, 1), greedy(12)) == expected
        await settled(engine)

    expected = reference(model, prompt_of(9, 1), 12)
    run_with_engine(scenario, model, batcher=one_by_one(model))


def test_an_answer_that_cannot_leave_is_told_its_end_once(
    model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Scheduler.release

    def broken(self: Scheduler, sequences: Any, **options: Any) -> list[SequenceState]:
        if leaving := list(sequences):
            raise torch.OutOfMemoryError("no memory")
        return release(self, leaving, **options)

    async def scenario(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        stays = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
        await watch.stopped()
        monkeypatch.setattr(Scheduler, "release", broken)
        ends: list[TokenEvent] = []
        last = engine.submit([EngineRequest(prompt_of(6), greedy(2, n=2))])
        watch.let_go()
        ends += [event async for event in last if event.finish_reason is not None]
        await asyncio.sleep(0.1)
        assert sorted(end.index for end in ends) == [0, 1] and [event async for event in last] == []
        assert [event async for event in stays][-1].finish_reason is FinishReason.ERROR

    run_with_engine(scenario, model)


def test_an_event_loop_that_goes_away_does_not_stop_the_engine(model: PreTrainedModel, watch: Watch) -> None:
    expected = reference(model, prompt_of(9, 1), 12)

    async def walk_away(engine: EngineCore) -> None:
        watch.stop_at(decodes(engine, 1))
        engine.submit([EngineRequest(prompt_of(5), greedy(100))])
        await watch.stopped()

    async def scenario(engine: EngineCore) -> None:
        assert await tokens_of(engine, prompt_of(9, 1), greedy(12)) == expected
        await settled(engine)

    with running(model) as engine:
        run(walk_away(engine))
        watch.let_go()
        run(scenario(engine))
