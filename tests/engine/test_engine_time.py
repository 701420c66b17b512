"""Deadlines, draining and restarts of a running engine."""

from __future__ import annotations

import asyncio
import time
import weakref
from functools import partial

import pytest
import torch

from mlserver_torch_stream.engine import core
from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.own_engine import torch_inference
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.queue import QueueLimits
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.step.serial import SerialBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import GenerationFailed, NotServing, QueueFull, TimedOut
from mlserver_torch_stream.types import FinishReason, ModelInfo
from tests.engine.tiny import (
    CONTEXT,
    VOCAB,
    batcher_over,
    byte_tokenizer,
    collect,
    greedy,
    reference,
    run,
    tiny_model,
    tokens_of,
    until,
)

PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A model that takes at least 20 ms for each token, so that a deadline can expire in the middle of an answer."""
    model = tiny_model()
    model.get_input_embeddings().register_forward_hook(lambda *_: time.sleep(0.02))
    return model


def batcher_of(kind: str, model: torch.nn.Module, max_num_seqs: int = 2) -> Batcher:
    samplers = SamplerFactory(TextCodec(byte_tokenizer()), VOCAB)
    if kind == "serial":
        return SerialBatcher(model, samplers, max_num_seqs=max_num_seqs)
    return batcher_over(model, max_num_seqs=max_num_seqs, prefill_tokens=16)


def engine_of(batcher: Batcher, queue_limits: QueueLimits | None = None, **options: object) -> EngineCore:
    info = ModelInfo(vocab_size=VOCAB, max_model_len=CONTEXT, max_num_seqs=2)
    codec, context = TextCodec(byte_tokenizer()), partial(torch_inference, 1)
    return EngineCore(batcher, codec, info, (), queue_limits=queue_limits, context=context, **options)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["batched", "serial"])
def test_a_request_whose_time_is_over_ends_with_what_it_has(kind: str, model: torch.nn.Module) -> None:
    engine = engine_of(batcher_of(kind, model))
    try:
        request = EngineRequest(tuple(PROMPT), greedy(200), timeout_s=2.0)
        event = run(collect(engine, [request]))[0]
        assert event.finish_reason is FinishReason.TIMEOUT
        assert isinstance(event.error, TimedOut)
        assert 0 < len(event.token_ids) < 200
        assert list(event.token_ids) == reference(model, PROMPT, len(event.token_ids))
        assert engine.stats().timed_out_sequences == 1
        assert run(tokens_of(engine, PROMPT, greedy(3))) == reference(model, PROMPT, 3)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", ["batched", "serial"])
def test_a_request_whose_time_is_over_when_it_comes_gets_no_token(kind: str, model: torch.nn.Module) -> None:
    engine = engine_of(batcher_of(kind, model))
    try:
        for _ in range(20):
            event = run(collect(engine, [EngineRequest(tuple(PROMPT), greedy(2), timeout_s=1e-6)]))[0]
            assert event.finish_reason is FinishReason.TIMEOUT and event.token_ids == ()
        assert engine.stats().timed_out_sequences == 20
    finally:
        engine.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["batched", "serial"])
def test_a_request_that_waits_too_long_ends_before_its_first_token(kind: str, model: torch.nn.Module) -> None:
    engine = engine_of(batcher_of(kind, model, max_num_seqs=1), QueueLimits(queue_timeout=1.5))

    async def two() -> None:
        first = asyncio.create_task(collect(engine, [EngineRequest(tuple(PROMPT), greedy(150))]))
        await until(lambda: engine.stats().running_sequences == 1, "the first one's start")
        second = (await collect(engine, [EngineRequest(tuple(PROMPT), greedy(60))]))[0]
        assert second.finish_reason is FinishReason.TIMEOUT and second.token_ids == ()
        assert (await first)[0].finish_reason is FinishReason.LENGTH

    try:
        run(two())
    finally:
        engine.shutdown()


def test_a_full_queue_says_when_to_come_back(model: torch.nn.Module) -> None:
    engine = engine_of(
        batcher_of("batched", model, max_num_seqs=1), QueueLimits(max_queued_requests=10, max_queued_tokens=7)
    )

    async def fill() -> None:
        streams = [engine.submit([EngineRequest(tuple(PROMPT), greedy(100))])]
        while engine.stats().running_sequences == 0:
            await asyncio.sleep(0.01)
        streams += [engine.submit([EngineRequest(tuple(PROMPT), greedy(100))]) for _ in range(2)]
        while engine.stats().waiting_tokens < 6:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match="9 prompt tokens would wait; at most 7 may wait") as caught:
            engine.submit([EngineRequest(tuple(PROMPT), greedy(100))])
        assert caught.value.retry_after >= 1
        for stream in streams:
            stream.close()

    try:
        run(fill())
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", ["batched", "serial"])
def test_draining_refuses_newcomers_lets_streams_go_on_and_ends_them_when_told(
    kind: str, model: torch.nn.Module
) -> None:
    engine = engine_of(batcher_of(kind, model))

    async def drained() -> None:
        short = asyncio.create_task(collect(engine, [EngineRequest(tuple(PROMPT), greedy(5))]))
        long = asyncio.create_task(collect(engine, [EngineRequest(tuple(PROMPT), greedy(200))]))
        await asyncio.sleep(0.05)
        engine.drain("drained")
        with pytest.raises(NotServing, match="drained"):
            engine.submit([EngineRequest(tuple(PROMPT), greedy(5))])
        assert (await short)[0].finish_reason is FinishReason.LENGTH
        engine.abort_all("aborted")
        event = (await long)[0]
        assert event.finish_reason is FinishReason.ABORT and isinstance(event.error, NotServing)
        assert str(event.error) == "aborted"
        count = len(event.token_ids)
        assert list(event.token_ids) == reference(model, PROMPT, count + 1)[:count]

    try:
        run(drained())
    finally:
        engine.shutdown()


class Killer:
    """A hook that ends the engine's thread in the middle of a forward, as a failing interpreter would.

    ``forwards`` counts down to the forward that does not return; with 0, all return.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.forwards = 0
        self.handle = model.get_input_embeddings().register_forward_hook(self)

    def __call__(self, *_: object) -> None:
        if self.forwards:
            self.forwards -= 1
            if not self.forwards:
                raise SystemExit("killed")


def test_an_engine_that_dies_ends_its_streams_and_serves_anew() -> None:
    model = tiny_model()
    expected = reference(model, PROMPT, 5)
    killer = Killer(model)
    engine = engine_of(batcher_of("batched", model), rebuild=lambda deaths: batcher_of("batched", model))

    async def killed() -> None:
        killer.forwards = 20
        last = [event async for event in engine.submit([EngineRequest(tuple(PROMPT), greedy(200))])][-1]
        assert isinstance(last.error, GenerationFailed)
        assert await tokens_of(engine, PROMPT, greedy(5)) == expected

    try:
        counted = 0
        for _ in range(3):
            run(killed())
            assert engine.stats().generation_tokens >= counted + 5  # a counter goes on where the dead backend's stopped
            counted = engine.stats().generation_tokens
        deaths: list[BaseException] = []
        engine._on_death = deaths.append
        with pytest.raises(NotServing):
            run(killed())  # the fourth within ten minutes: it stays dead
        engine._thread.join(60)
        assert not engine.alive and len(deaths) == 1
    finally:
        engine.shutdown()


def test_the_cache_of_a_dead_batcher_is_free_before_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would have no room for two caches."""
    monkeypatch.setattr(core.logger, "disabled", True)  # a log record that pytest keeps holds the frames
    model, left = tiny_model(), []
    killer, batcher = Killer(model), batcher_of("batched", model)
    cache = weakref.ref(batcher._cache)  # type: ignore[attr-defined]

    def rebuild(deaths: int) -> Batcher:
        left.append(cache())
        return batcher_of("batched", model)

    engine = engine_of(batcher, rebuild=rebuild)
    del batcher
    try:
        killer.forwards = 5
        last = run(collect(engine, [EngineRequest(tuple(PROMPT), greedy(200))]))[0]
        assert isinstance(last.error, GenerationFailed)
        assert left == [None]
        assert run(tokens_of(engine, PROMPT, greedy(5))) == reference(model, PROMPT, 5)
    finally:
        engine.shutdown()
