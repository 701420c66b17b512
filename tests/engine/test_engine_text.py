"""The events that a reader gets: whole characters, in order, merged when the reader lags."""

import asyncio
import math
import time
from itertools import accumulate
from typing import Any

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import MAX_PER_EVENT, FinishReason, SamplingParameters, TokenEvent
from tests.engine.tiny import (
    EOS,
    Watch,
    byte_tokenizer,
    decodes,
    dictated,
    greedy,
    in_step_with,
    prompt_of,
    run,
    run_with_engine,
    running,
    spelled,
    until,
)

CODEC = TextCodec(byte_tokenizer())


async def events_of(engine: EngineCore, prompt: tuple[int, ...], params: SamplingParameters) -> list[TokenEvent]:
    return [event async for event in engine.submit([EngineRequest(prompt, params)])]


def ended(late: Mailbox, sequences: int) -> bool:
    """Returns whether the last events of all sequences are waiting for their reader."""
    waiting = late._pending.values()
    return len(waiting) == sequences and all(events[-1].finish_reason is not None for events in waiting)


@pytest.mark.parametrize("skip", [True, False])
def test_the_events_join_to_the_decode_of_all_tokens(model: PreTrainedModel, skip: bool) -> None:
    async def scenario(engine: EngineCore) -> None:
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

    run_with_engine(scenario, model)


def test_no_event_splits_a_character(model: PreTrainedModel, watch: Watch) -> None:
    said = "Ünïcödé 日本語 🙂🚀 €"
    ids = spelled(said)

    async def scenario(engine: EngineCore) -> list[TokenEvent]:
        watch.fail = in_step_with(asyncio.get_running_loop())
        return await events_of(engine, prompt_of(5), greedy(len(ids)))

    with running(model) as engine, dictated(model, ids, prompt=5):
        events = run(scenario(engine))
    assert "".join(event.text for event in events) == said
    assert not any("\N{REPLACEMENT CHARACTER}" in event.text for event in events)
    assert len(events) > len(said) // 2


@pytest.mark.parametrize(
    ("asked", "stop_reason"),
    [
        ({}, None),
        ({"stop": ("ox",)}, "ox"),
        ({"stop_token_ids": tuple(spelled("x"))}, spelled("x")[0]),
        ({"stop": ("cat",)}, None),
    ],
)
def test_the_last_event_says_what_stopped_the_sequence(
    model: PreTrainedModel, asked: dict[str, Any], stop_reason: int | str | None
) -> None:
    ids = [*spelled("fox"), EOS]
    params = SamplingParameters(max_tokens=8, logprobs=True, eos_token_ids=(EOS,), **asked)
    with running(model) as engine, dictated(model, ids, prompt=5):
        events = run(events_of(engine, prompt_of(5), params))
    *earlier, last = events
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop_reason)
    assert {event.stop_reason for event in earlier} <= {None}
    special = [entry.special for event in events for entry in event.logprobs]
    assert special == ([False] * 3 + [True] if stop_reason is None else [False] * 3)


def test_a_sequence_that_ends_otherwise_has_no_stop_reason(model: PreTrainedModel) -> None:
    with running(model) as engine, dictated(model, spelled("fox"), prompt=5):
        *_, last = run(events_of(engine, prompt_of(5), SamplingParameters(max_tokens=2, stop=("zz",))))
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)


@pytest.mark.long
def test_a_reader_that_lags_gets_fewer_events_of_bounded_size_and_the_same_text(model: PreTrainedModel) -> None:
    """Each token is one character, so every event shows whether text, tokens and log-probabilities stay together."""
    ids = spelled("The quick brown fox jumps over the lazy dog. ") * 5
    params = SamplingParameters(max_tokens=200, ignore_eos=True, logprobs=True, top_logprobs=2, n=2)

    async def scenario(engine: EngineCore) -> None:
        late = engine.submit([EngineRequest(prompt_of(5), params)])
        await until(lambda: ended(late, 2), "the end of the answers")
        events = [event async for event in late]
        assert 2 < len(events) < 20
        assert max(event.size for event in events) <= MAX_PER_EVENT
        for index in range(2):
            own = [event for event in events if event.index == index]
            assert [token for event in own for token in event.token_ids] == ids[:200]
            for event in own:
                assert event.text == CODEC.decode(event.token_ids, False)
                assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
            sums = accumulate(entry.logprob for event in own for entry in event.logprobs)
            assert {event.cumulative_logprob for event in own} <= set(sums)
            assert [event.finish_reason for event in own] == [*[None] * (len(own) - 1), FinishReason.LENGTH]

    with running(model) as engine, dictated(model, ids, prompt=5):
        run(scenario(engine))


def test_events_between_the_first_and_the_last_have_the_tokens_of_an_interval(
    model: PreTrainedModel, watch: Watch
) -> None:
    said = "The quick brown fox 日本 jumps."
    ids = spelled(said)

    async def scenario(engine: EngineCore) -> list[TokenEvent]:
        watch.fail = in_step_with(asyncio.get_running_loop())
        return await events_of(engine, prompt_of(5), greedy(len(ids), logprobs=True))

    with running(model, event_interval=(8, math.inf)) as engine, dictated(model, ids, prompt=5):
        first, *others, last = run(scenario(engine))
    assert len(first.token_ids) == 1 and last.finish_reason is FinishReason.LENGTH
    assert others and all(len(event.token_ids) >= 8 for event in others)
    events = [first, *others, last]
    assert [token for event in events for token in event.token_ids] == ids
    assert [entry.token_id for event in events for entry in event.logprobs] == ids
    assert "".join(event.text for event in events) == said


def test_an_event_is_due_after_its_time_or_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop, 1, lambda mailbox: None)
    given = EngineRequest(prompt_of(3), greedy(50))
    request = RequestState(given, mailbox, CODEC, (), 100, event_interval=(5, 0.2))
    sequence, sizes = request.sequences[0], list[int]()
    for token in spelled("The quick brown fox"):
        sequence.accept(token, None)
        sequence.write()
        sizes.append(sum(len(event.token_ids) for event in sequence.take_events()))
        now += 0.01 if len(sizes) < 8 else 0.15
    loop.close()
    assert sizes == [1, 0, 0, 0, 0, 5, 0, 0, 0, 4, 0, 2, 0, 2, 0, 2, 0, 2, 0]


_SPECIAL = min(CODEC.special_ids)


@pytest.mark.parametrize(
    ("tokens", "interval", "waits"),
    [
        (spelled("日本語"), (1, math.inf), "...xx.xx."),
        (spelled("日本語"), (9, math.inf), "........."),
        (spelled("日本語"), (9, 0.15), "....x..x."),
        ([*spelled("a"), *[_SPECIAL] * 5, *spelled("b")], (1, math.inf), ".xxx..."),
        (spelled("a no nos"), (1, math.inf), "..xx.xx."),
    ],
    ids=["characters", "each nine tokens", "or a time", "special tokens", "a stop string"],
)
def test_text_is_awaited_for_a_few_tokens_and_only_when_an_event_is_due(
    monkeypatch: pytest.MonkeyPatch,
    loop: asyncio.AbstractEventLoop,
    tokens: list[int],
    interval: tuple[int, float],
    waits: str,
) -> None:
    """Steps then keep prompts out; a token takes 0.1 s, and its text is made after the next step may be planned."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given = EngineRequest(prompt_of(3), greedy(50, stop=("not",)))
    mailbox = Mailbox(loop, 1, lambda mailbox: None)
    request = RequestState(given, mailbox, CODEC, (), 100, event_interval=interval)
    sequence, found = request.sequences[0], ""
    for token in tokens:
        now += 0.1
        before = sequence.awaits_text
        sequence.accept(token, None)
        assert sequence.awaits_text <= before  # a token whose text is not made yet says nothing
        sequence.write()
        sequence.take_events()
        found += "x" if sequence.awaits_text else "."
    assert found == waits


@pytest.mark.parametrize(
    ("text", "interval", "waits"),
    [
        ("日本語", (1, math.inf), [0, 1, 2, 0, 1, 2, 0]),
        ("日本語", (2, math.inf), [0, 0, 1, 0, 0, 1, 0]),
        ("日本語", (9, 0.25), [0, 0, 0, 0, 0, 0, 0]),
        ("no" * 4, (100, math.inf), [0] * 8),
    ],
)
def test_a_reader_waits_from_the_last_token_after_which_no_event_was_due(
    monkeypatch: pytest.MonkeyPatch,
    loop: asyncio.AbstractEventLoop,
    text: str,
    interval: tuple[int, float],
    waits: list[int],
) -> None:
    """A preempted sequence with a long interval has not waited since its last event. A token takes 0.1 s."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mailbox = Mailbox(loop, 1, lambda mailbox: None)
    request = RequestState(EngineRequest(prompt_of(3), greedy(50)), mailbox, CODEC, (), 100, event_interval=interval)
    (sequence,), found = request.sequences, list[int]()
    for token in spelled(text):
        now += 0.1
        sequence.accept(token, None)
        sequence.write()
        sequence.take_events()
        found.append(round(10 * (now - sequence.waits_since)))
    assert found[-len(waits) :] == waits


def test_tokens_within_an_interval_come_with_an_end_from_outside(model: PreTrainedModel, watch: Watch) -> None:
    """A time limit ends the answer after its first event and before the second."""

    async def scenario(engine: EngineCore) -> list[TokenEvent]:
        watch.fail = lambda ids: time.sleep(0.02)
        request = EngineRequest(prompt_of(5), greedy(150), timeout_s=1.0)
        return [event async for event in engine.submit([request])]

    with running(model, event_interval=(1000, math.inf)) as engine:
        first, last = run(scenario(engine))
    assert last.finish_reason is FinishReason.TIMEOUT and last.usage is not None
    assert len(first.token_ids) + len(last.token_ids) == last.usage.num_output_tokens
    assert first.text + last.text == CODEC.decode((*first.token_ids, *last.token_ids), True)
    assert last.text


@pytest.mark.long
def test_a_lagging_reader_of_several_sequences_gets_all_of_them_in_turn(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        params = SamplingParameters(max_tokens=240, ignore_eos=True, logprobs=True, top_logprobs=10, n=3)
        late = engine.submit([EngineRequest(prompt_of(5), params)])
        await until(lambda: engine.stats().generation_tokens == 720, "the end of the answers")
        await until(lambda: ended(late, 3), "their delivery")
        assert [(await anext(late)).index for _ in range(6)] == [0, 1, 2, 0, 1, 2]
        late.close()

    run_with_engine(scenario, model)


@pytest.mark.long
def test_a_text_that_was_held_back_comes_in_events_of_bounded_size(model: PreTrainedModel) -> None:
    """Text that begins like a long stop string is held back until it differs from it."""
    said = "a" * 200
    params = SamplingParameters(
        max_tokens=200, ignore_eos=True, logprobs=True, top_logprobs=20, stop=("a" * 199 + "b",)
    )
    with running(model) as engine, dictated(model, spelled(said), prompt=5):
        events = run(events_of(engine, prompt_of(5), params))
    assert "".join(event.text for event in events) == said
    assert sum(len(event.token_ids) for event in events) == sum(len(event.logprobs) for event in events) == 200
    assert max(event.size for event in events) <= MAX_PER_EVENT
    assert [event.finish_reason is not None for event in events] == [*[False] * (len(events) - 1), True]


@pytest.mark.long
def test_the_engine_does_not_wait_for_a_reader(model: PreTrainedModel, watch: Watch) -> None:
    """One stream is never read, and both it and another stream end."""

    async def scenario(engine: EngineCore) -> None:
        watch.fail = in_step_with(asyncio.get_running_loop())
        unread = engine.submit([EngineRequest(prompt_of(5), greedy(150))])
        assert len(await events_of(engine, prompt_of(6), greedy(50))) > 1
        await until(lambda: engine.stats().running_sequences == 0, "the end of both")
        assert engine.stats().generation_tokens == 200
        unread.close()

    run_with_engine(scenario, model)


def test_every_event_suspends_its_reader(model: PreTrainedModel) -> None:
    """A reader that always finds events would otherwise never wait, and would block all other tasks of its loop."""

    async def scenario(engine: EngineCore) -> None:
        stream = engine.submit([EngineRequest(prompt_of(5, i), greedy(3), first_index=i) for i in range(8)])
        await until(lambda: len(stream._pending) == 8 and engine.stats().running_sequences == 0, "eight events")
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

    run_with_engine(scenario, model)


@pytest.mark.long
def test_one_step_of_a_batch_wakes_the_loop_once(model: PreTrainedModel, watch: Watch) -> None:
    async def scenario(engine: EngineCore) -> None:
        loop = asyncio.get_running_loop()
        calls = 0
        original = loop.call_soon_threadsafe

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)  # type: ignore[arg-type]

        watch.stop_at(decodes(engine, 8))
        streams = [engine.submit([EngineRequest(prompt_of(5, i), greedy(100))]) for i in range(8)]
        await watch.stopped()
        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        before = engine.stats().decode_steps
        watch.let_go()
        await until(lambda: engine.stats().running_sequences == 0, "the end")
        assert 0 < calls <= engine.stats().decode_steps - before + 1
        for stream in streams:
            stream.close()

    run_with_engine(scenario, model)
