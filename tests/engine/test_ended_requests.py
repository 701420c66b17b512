"""An ended request is freed with its sequences, mailbox and matchers, without a garbage collection."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.step import continuous
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import Constraint, ConstraintKind, FinishReason
from tests.engine.emulated import LONG, before_each_forward, decoding, laid_out, pipelined
from tests.engine.noted_matchers import note_matchers
from tests.engine.tiny import Watch, greedy, one_by_one, prompt_of, run, running, tiny_model, tokens_of, until

Refs = Sequence[weakref.ref[Any]]
Scenario = Callable[[EngineCore], Awaitable[Refs]]
_NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


def submitted(engine: EngineCore, *requests: EngineRequest) -> tuple[Mailbox, list[weakref.ref[Any]]]:
    """Submits the requests. Returns the stream, and weak references to its mailbox, its requests and its sequences.

    The engine's thread waits until the references exist; otherwise it could end the requests first.
    """
    made = threading.Event()

    def wait() -> None:
        made.wait()

    engine._inbox.post(wait)
    try:
        stream = engine.submit(requests)
        accepted = engine._open[stream]
        sequences = [sequence for request in accepted for sequence in request.sequences]
        return stream, [weakref.ref(each) for each in (stream, *accepted, *sequences)]
    finally:
        made.set()


async def ends(engine: EngineCore) -> Refs:
    requests = EngineRequest(prompt_of(5), greedy(12, n=2)), EngineRequest(prompt_of(9), greedy(5), 2)
    stream, refs = submitted(engine, *requests)
    assert [event.finish_reason async for event in stream].count(FinishReason.LENGTH) == 3
    return refs


async def is_cancelled(engine: EngineCore) -> Refs:
    stream, refs = submitted(engine, EngineRequest(prompt_of(5), greedy(200, n=2)))
    await anext(stream)
    stream.close()
    return refs


async def is_cancelled_before_its_prompt_is_whole(engine: EngineCore) -> Refs:
    stream, refs = submitted(engine, EngineRequest((), greedy(5), open=True))
    stream.extend(prompt_of(9))
    stream.close()
    return refs


async def is_out_of_time(engine: EngineCore) -> Refs:
    stream, refs = submitted(engine, EngineRequest((), greedy(5), open=True, timeout_s=0.05))
    assert [event.finish_reason async for event in stream] == [FinishReason.TIMEOUT]
    return refs


async def ends_before_its_time_is_over(engine: EngineCore) -> Refs:
    stream, refs = submitted(engine, EngineRequest(prompt_of(5), greedy(12), timeout_s=3600))
    assert [event async for event in stream][-1].finish_reason is FinishReason.LENGTH
    return refs


SCENARIOS = [ends, is_cancelled, is_cancelled_before_its_prompt_is_whole, is_out_of_time, ends_before_its_time_is_over]


def check(engine: EngineCore, scenario: Scenario) -> None:
    async def freed() -> None:
        refs = await scenario(engine)
        await until(lambda: not any(ref() for ref in refs), "the end of all these objects")

    run(freed())


@pytest.mark.parametrize("serial", [False, True], ids=["batched", "serial"])
def test_a_request_is_freed_when_it_has_ended(model: PreTrainedModel, serial: bool) -> None:
    with running(model, batcher=one_by_one(model) if serial else None, prefix_bytes=2**20) as engine:
        for scenario in SCENARIOS:
            check(engine, scenario)


def test_a_request_is_freed_when_it_has_ended_in_a_pipeline() -> None:
    with pipelined(laid_out(tiny_model("llama"), 3), prefix_bytes=2**20) as (engine, _):
        for scenario in SCENARIOS:
            check(engine, scenario)


def fails(ids: Any) -> Exception:
    return RuntimeError("no memory")


def fails_for_a_cause(ids: Any) -> Exception:
    try:
        raise RuntimeError("no memory")
    except RuntimeError as error:
        raise MemoryError("no memory for a pool") from error


def fails_without_its_cause(ids: Any) -> Exception:
    try:
        raise RuntimeError("no memory")
    except RuntimeError:
        raise MemoryError("no memory for a pool") from None


@pytest.mark.parametrize("fail", [fails, fails_for_a_cause, fails_without_its_cause])
def test_requests_whose_step_fails_are_freed(
    fail: Callable[[Any], Exception], model: PreTrainedModel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames in the traceback of a forward's error refer to the step's sequences; so do those of its causes.

    pytest keeps logged errors, so the test turns the logger off.
    """
    monkeypatch.setattr(continuous.logger, "disabled", True)

    async def scenario(engine: EngineCore) -> Refs:
        watch.fail = fail
        stream, refs = submitted(engine, *(EngineRequest(prompt_of(5), greedy(9), index) for index in range(2)))
        assert [event.finish_reason async for event in stream] == [FinishReason.ERROR] * 2
        return refs

    with running(model) as engine:
        check(engine, scenario)
        watch.fail = lambda ids: None
        assert len(run(tokens_of(engine, prompt_of(4), greedy(3)))) == 3


def test_requests_are_freed_whose_step_reads_pages_of_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline, both steps are in flight at the same time."""
    monkeypatch.setattr(continuous.logger, "disabled", True)
    prompt, gate = prompt_of(24), threading.Event()

    def fail(batch: Batch) -> None:
        if any(each.count == len(prompt) for each in batch.sequences):
            assert gate.wait(30)
            raise RuntimeError("no memory")
        time.sleep(0.005)

    async def scenario(engine: EngineCore) -> Refs:
        beside = await decoding(engine, 3)
        first, refs = submitted(engine, EngineRequest(prompt, greedy(4)))
        await until(lambda: engine.stats().prefilling_requests == 1, "the first prompt in flight")
        second, more = submitted(engine, EngineRequest((*prompt, 5, 6), greedy(4)))
        await until(lambda: engine.stats().prefilling_requests == 2, "both prompts in flight")
        gate.set()
        assert [event async for event in first][-1].finish_reason is FinishReason.ERROR
        assert [event async for event in second][-1].finish_reason is FinishReason.LENGTH
        for each in beside:
            each.close()
        return [*refs, *more]

    model = laid_out(tiny_model("llama"), 3)
    with pipelined(model, prefix_bytes=2**20, prefill_tokens=32, context=2 * LONG) as (engine, _):
        before_each_forward(engine, fail)
        try:
            check(engine, scenario)
        finally:
            gate.set()


@pytest.mark.parametrize("leaves", [False, True], ids=["ends", "is cancelled"])
@pytest.mark.parametrize("serial", [False, True], ids=["batched", "serial"])
def test_a_request_with_a_constraint_is_freed_with_its_matchers(
    model: PreTrainedModel, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, serial: bool, leaves: bool
) -> None:
    matchers = note_matchers(monkeypatch)
    constraint = codec.submit(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_NAME), "field")).result()

    async def scenario(engine: EngineCore) -> Refs:
        params = greedy(60, n=2, temperature=1.0, seed=3)
        stream, refs = submitted(engine, EngineRequest(prompt_of(5), params, constraint=constraint))
        await anext(stream)
        if leaves:
            stream.close()
        async for _ in stream:
            pass
        return [*refs, *matchers]

    with running(model, batcher=one_by_one(model) if serial else None) as engine:
        check(engine, scenario)
    assert len(matchers) == 2


@pytest.mark.parametrize("serial", [False, True], ids=["batched", "serial"])
def test_a_request_whose_constraint_becomes_too_complex_is_freed(
    model: PreTrainedModel, codec: TextCodec, serial: bool
) -> None:
    """The error is raised, and the frames of its traceback refer to the sequence."""
    many = " | ".join(f'"a" "{number:04}"' for number in range(2500))  # at most 2,000 may be open at a time
    constraint = codec.submit(Constraint(ConstraintKind.GRAMMAR, f"start: /[bc]/ ({many})", "field")).result()

    async def fails(engine: EngineCore) -> Refs:
        stream, refs = submitted(engine, EngineRequest(prompt_of(4), greedy(9), constraint=constraint))
        assert [event async for event in stream][-1].finish_reason is FinishReason.ERROR
        return refs

    with running(model, batcher=one_by_one(model) if serial else None) as engine:
        check(engine, fails)
        assert len(run(tokens_of(engine, prompt_of(4), greedy(3)))) == 3
