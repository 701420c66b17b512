"""Several engines as one: the least loaded gets the next request, and if one dies, the others go on serving."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.api import Engine, EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.failures import StepTimeout
from mlserver_torch_stream.engine.replicas import ReplicatedEngine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.step.batcher import BatcherReplacement
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, LoadFailed, NotServing, QueueFull
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import FinishReason
from tests.engine.emulated import before_each_forward
from tests.engine.tiny import collect, greedy, prompt_of, run, until

REQUESTS = [(prompt_of(3 + 5 * number, number), 8 + 5 * number) for number in range(6)]


def build(
    folder: Path, deaths: list[BaseException] | None = None, resources: ProcessResources | None = None, **extra: Any
) -> Any:
    settings = {"threads": 1, "kv_cache_memory": "8MiB", "fast_path": "off", **extra}
    resolved = parse_settings(str(folder), settings, environ={})
    on_death = deaths.append if deaths is not None else None
    return build_engine(resolved, on_death=on_death, resources=ProcessResources() if resources is None else resources)


def end(built: BuiltEngine) -> None:
    if built.give_back():
        built.shutdown()


@pytest.fixture
def deaths() -> list[BaseException]:
    return []


@pytest.fixture
def three(tiny_model: Path, deaths: list[BaseException]) -> Iterator[BuiltEngine]:
    built = build(tiny_model, deaths, replicas=3, max_queued_requests=4, step_timeout=6.0)
    yield built
    end(built)


def members(built: BuiltEngine) -> Sequence[EngineCore]:
    return [part.engine for part in built.lease.value.parts]  # type: ignore[misc]


async def sequence(engine: Engine, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    event = (await collect(engine, [EngineRequest(prompt, greedy(count))]))[0]  # type: ignore[arg-type]
    assert event.error is None, event.error
    return event.token_ids


def slow_down(built: BuiltEngine) -> None:
    """Delays each forward, so that no answer of 600 tokens ends while a test looks at other ones."""
    for member in members(built):
        before_each_forward(member, lambda batch: time.sleep(0.003))


async def kill(engine: EngineCore) -> None:
    """Ends the engine for good: its restart fails as after the loss of a device."""

    def lost(deaths: int) -> Any:
        raise RuntimeError("the device is lost")

    engine._replacement = BatcherReplacement(lost)
    engine.fail(RuntimeError("an illegal access"))
    await until(lambda: not engine.alive, "a dead replica")


@pytest.mark.long
def test_replicas_give_the_tokens_of_one_engine_and_count_together(three: BuiltEngine, tiny_model: Path) -> None:
    one = build(tiny_model)

    async def scenario(engine: Engine) -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*(sequence(engine, *request) for request in REQUESTS)))

    expected = run(scenario(one.engine))
    end(one)
    assert "3 replicas" in three.summary
    assert run(scenario(three.engine)) == expected
    assert three.engine.stats().generation_tokens == sum(count for _, count in REQUESTS)
    assert [member.stats().generation_tokens > 0 for member in members(three)] == [True] * 3


def test_replicas_of_one_machine_share_the_weights(tiny_model: Path) -> None:
    resources = ProcessResources()
    built = build(tiny_model, resources=resources, replicas=2)
    assert resources.weights.made == 1
    end(built)
    assert len(resources.weights) == 0


def test_a_prompt_goes_to_the_replica_with_the_least_to_do(three: BuiltEngine) -> None:
    slow_down(three)

    async def scenario() -> None:
        streams = [three.engine.submit([EngineRequest(prompt_of(5, number), greedy(900))]) for number in range(3)]
        assert [member.load for member in members(three)] == [1, 1, 1]
        streams[1].close()
        await until(lambda: members(three)[1].load == 0, "an idle replica")
        streams.append(three.engine.submit([EngineRequest(prompt_of(5, 7), greedy(900))]))
        assert [member.load for member in members(three)] == [1, 1, 1]
        for stream in streams:
            stream.close()

    run(scenario())


def test_what_is_too_much_for_one_cache_goes_to_a_larger_one(tiny_model: Path) -> None:
    """The caches differ in size, as on GPUs that other models share."""
    parts = [build(tiny_model, kv_cache_memory=size) for size in ("2MiB", "8MiB")]
    engine = ReplicatedEngine([part.engine for part in parts])

    async def scenario() -> None:
        streams = [engine.submit([EngineRequest(prompt_of(5), greedy(900, n=8))]) for _ in range(2)]
        assert [part.engine.load > 0 for part in parts] == [False, True]
        for stream in streams:
            stream.close()
        with pytest.raises(InvalidInput):
            engine.submit([EngineRequest(prompt_of(5), greedy(900, n=32))])

    run(scenario())
    for part in parts:
        end(part)


def test_what_one_has_no_room_for_another_takes_until_none_has(tiny_model: Path) -> None:
    built = build(tiny_model, replicas=2, max_queued_requests=1, max_num_seqs=1)
    slow_down(built)

    async def scenario() -> None:
        streams = []
        for number in range(2):
            streams.append(built.engine.submit([EngineRequest(prompt_of(5, number), greedy(900))]))
            await until(lambda: built.engine.stats().running_sequences == len(streams), "a row")
        streams += [built.engine.submit([EngineRequest(prompt_of(5, 9), greedy(9))]) for _ in range(2)]
        with pytest.raises(QueueFull):
            built.engine.submit([EngineRequest(prompt_of(5, 9), greedy(9))])
        for stream in streams:
            stream.close()

    run(scenario())
    end(built)


@pytest.mark.long
def test_ones_death_ends_its_own_streams_and_leaves_the_others_serving(
    three: BuiltEngine, deaths: list[BaseException]
) -> None:
    slow_down(three)

    async def scenario() -> None:
        readers = [
            asyncio.create_task(collect(three.engine, [EngineRequest(prompt_of(5, number), greedy(600))]))  # type: ignore[arg-type]
            for number in range(3)
        ]
        await until(lambda: three.engine.stats().running_sequences == 3, "three rows")
        await kill(members(three)[0])
        ends = [(await reader)[0] for reader in readers]
        assert [event.finish_reason for event in ends] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
        assert isinstance(ends[0].error, GenerationFailed)
        assert three.engine.alive and deaths == []
        for _ in range(4):
            await sequence(three.engine, prompt_of(4), 3)

    run(scenario())


def test_the_last_ones_death_is_everybodys(three: BuiltEngine, deaths: list[BaseException]) -> None:
    async def scenario() -> None:
        for member in members(three):
            assert three.engine.alive and deaths == []
            await kill(member)
        assert not three.engine.alive
        await until(lambda: len(deaths) == 1, "word of the end")
        with pytest.raises(NotServing):
            three.engine.submit([EngineRequest(prompt_of(3))])

    run(scenario())


@pytest.mark.long
def test_one_that_hangs_is_given_no_work_and_its_end_is_everybodys(
    three: BuiltEngine, deaths: list[BaseException]
) -> None:
    """Its thread cannot be ended, and keeps the cores that the other engines wait for."""

    async def scenario() -> None:
        hung = members(three)[0]
        began = threading.Event()

        def hang(*_: Any) -> bool:
            began.set()
            assert let_go.wait(60)
            return False

        step, hung._batcher.step = hung._batcher.step, hang  # type: ignore[method-assign]
        stream = hung.submit([EngineRequest(prompt_of(5), greedy(9))])
        await until(began.is_set, "a step")
        await until(lambda: hung.trouble is not None, "trouble")
        await until(lambda: three.engine.trouble is not None, "trouble of all: they wait for the cores")
        others = [three.engine.submit([EngineRequest(prompt_of(5), greedy(9))]) for _ in range(4)]
        assert [member.load for member in members(three)] == [1, 2, 2], "none goes to the one that hangs"
        await until(lambda: len(deaths) == 1, "word of its end")
        assert isinstance(deaths[0], StepTimeout)
        assert [event.finish_reason async for event in stream] == [FinishReason.ERROR]
        hung._batcher.step = step  # type: ignore[method-assign]
        let_go.set()
        for other in others:
            other.close()

    let_go = threading.Event()
    try:
        run(scenario())
    finally:
        let_go.set()


def test_a_draining_engine_drains_all(three: BuiltEngine) -> None:
    slow_down(three)

    async def scenario() -> None:
        stream = three.engine.submit([EngineRequest(prompt_of(5), greedy(900))])
        three.engine.drain("drained")
        with pytest.raises(NotServing):
            three.engine.submit([EngineRequest(prompt_of(3))])
        three.engine.abort_all("aborted")
        events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.ABORT

    run(scenario())


def test_replicas_share_what_is_free_for_the_cache(tiny_model: Path) -> None:
    built = build(tiny_model, replicas=2, kv_cache_memory=None)
    first, second = (member.stats().kv_cache_budget for member in members(built))
    assert 0.5 * first < second <= first
    end(built)


@pytest.mark.parametrize(
    ("key", "value"), [("device_map", "auto"), ("max_memory", {"cpu": "1GiB"}), ("tensor_parallel_size", 2)]
)
def test_settings_that_place_layers_do_not_go_with_replicas(tiny_model: Path, key: str, value: Any) -> None:
    with pytest.raises(LoadFailed, match=f"replicas: 2 cannot be combined with {key}"):
        build(tiny_model, replicas=2, **{key: value})


def test_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    from mlserver_torch_stream.engine.replicas import on_devices_of_their_own

    settings = parse_settings(str(tiny_model), {"replicas": 2}, environ={}).settings
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [each.device_map for each in on_devices_of_their_own(settings)] == [0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LoadFailed, match="2 GPUs are needed, but this machine has 1"):
        on_devices_of_their_own(settings)
