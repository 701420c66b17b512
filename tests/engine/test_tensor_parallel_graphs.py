"""Ranks that capture their decode steps, collectives included: all of them replay the same steps, or none does.

A tape stands for the device that captures, on the test's own process and on the other rank: see ``tests.engine.tape``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mlserver_torch_stream.engine import model as model_module
from mlserver_torch_stream.engine import ranks as ranks_module
from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.ranks import prepare_ranks
from mlserver_torch_stream.engine.tensor_parallel import rank_group
from mlserver_torch_stream.errors import GenerationFailed, LoadFailed
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import FinishReason
from tests.engine.emulated import before_each_forward, decodes_alone
from tests.engine.recording_rank import attends_as_on_cuda
from tests.engine.test_captured_forward import REQUESTS, Recorders, one_after_the_other
from tests.engine.tiny import byte_tokenizer, collect, greedy, prompt_of, reference, run, tiny_model, until
from tests.waiting import wait_until

# Biases; windows in some layers; packed projections; experts; norms over all heads; attention and MLP side by side.
FAMILIES = ["qwen2", "gemma3_text", "phi3", "mixtral", "olmo2", "gpt_neox"]
SETTINGS = {"tensor_parallel_size": 2, "threads": 1, "kv_cache_memory": "8MiB", "max_num_seqs": 3, "max_model_len": 256}
SUMMARY = "2 ranks, steps packed with gathered keys, CUDA graphs of up to 3 sequences"


class Ranks:
    """Two ranks that record; ``says`` is which recorder the other one has for its next capture."""

    def __init__(self, folder: Path, recorder: Path) -> None:
        self.recorders = Recorders()
        self._folder = folder
        self._recorder = recorder
        self.says("counts")

    def says(self, recorder: str) -> None:
        self._recorder.write_text(recorder)

    def build(self, **extra: Any) -> BuiltEngine:
        resolved = parse_settings(str(self._folder), {**SETTINGS, **extra}, environ={})
        return build_engine(resolved, resources=self.recorders.resources)

    @property
    def replays_there(self) -> int:
        return int(self._recorder.with_suffix(".replays").read_text() or 0)


@contextmanager
def recording(folder: Path, own: Path) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECORDER", str(own / "recorder"))
        patch.setattr(model_module, "prepare_ranks", partial(prepare_ranks, module="tests.engine.recording_rank"))
        patch.setattr(ranks_module, "_choose_forward", attends_as_on_cuda)
        yield Ranks(folder, own / "recorder")
    assert not torch.distributed.is_initialized()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")] == []


def end(built: BuiltEngine) -> None:
    if built.give_back():
        built.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "why"),
    [("breaks", "a rank has left a forward that the other ranks go on with"), ("dies", "rank 1 ended with status 7")],
)
def test_ranks_that_a_capture_has_parted_fail_the_load(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: str, why: str
) -> None:
    """Before the other tests, whose ranks live until the last one."""
    monkeypatch.setattr(rank_group, "_SERVING_TIMEOUT", timedelta(seconds=5))
    with recording(tiny_model, tmp_path) as ranks:
        ranks.says(recorder)
        with pytest.raises(LoadFailed, match=f"the ranks were lost while they captured their decode steps: .*{why}"):
            ranks.build()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_whose_layers_are_split_in_other_ways(family: str, tmp_path: Path) -> None:
    """Before the other tests, whose ranks live until the last one."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    expected = [reference(model, *request) for request in REQUESTS]
    with recording(tmp_path, tmp_path) as ranks:
        built = ranks.build()
        try:
            assert SUMMARY in built.summary
            before = ranks.recorders.replays
            assert run(one_after_the_other(built.engine)) == expected
            assert ranks.recorders.replays > before + 20
        finally:
            end(built)


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with recording(tiny_model, tmp_path_factory.mktemp("recorder")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def built(ranks: Ranks) -> Iterator[BuiltEngine]:
    built = ranks.build()
    graphs = built.engine._batcher._forward.own  # type: ignore[attr-defined]
    assert {shape.width for shape in graphs.shapes} == {4, 16}, "the other rank asks for narrow ones"
    yield built
    end(built)
    assert not graphs.shapes, "NCCL waits for graphs that hold its collectives"


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return [reference(model, *request) for request in REQUESTS]


def test_all_ranks_replay_the_same_steps_and_give_the_tokens_of_the_model(
    ranks: Ranks, built: BuiltEngine, expected: list[list[int]]
) -> None:
    assert SUMMARY in built.summary
    before = ranks.recorders.replays
    assert run(one_after_the_other(built.engine)) == expected
    assert ranks.recorders.replays > before + 20
    wait_until(lambda: ranks.replays_there == ranks.recorders.replays, "the same replays on the other rank")


def test_an_engine_that_starts_again_captures_on_all_ranks_again(
    ranks: Ranks, built: BuiltEngine, expected: list[list[int]]
) -> None:
    captures = len(ranks.recorders.made)
    gate = threading.Event()

    def hold(batch: Batch) -> None:
        assert not decodes_alone(batch) or gate.wait(30)

    async def die() -> None:
        before_each_forward(built.engine, hold)
        reader = asyncio.create_task(collect(built.engine, [EngineRequest(prompt_of(9), greedy(200))]))
        await until(lambda: built.engine.stats().running_sequences == 1, "a sequence")
        built.engine.fail(RuntimeError("of no rank"))
        gate.set()
        event = (await reader)[0]
        assert event.error is not None and "the engine died" in event.error.message

    run(die())
    assert len(ranks.recorders.made) == captures + 1
    before = ranks.recorders.made[-1].replays
    assert run(one_after_the_other(built.engine)) == expected
    assert ranks.recorders.made[-1].replays > before
    wait_until(lambda: ranks.replays_there == ranks.recorders.replays, "the same replays on the other rank")


def test_a_second_engine_on_the_same_ranks_replays_over_its_own_cache(
    ranks: Ranks, built: BuiltEngine, expected: list[list[int]]
) -> None:
    """As after a reload, while the last requests of the engine before still run."""
    other = ranks.build(max_queued_requests=7)
    assert ranks.recorders.resources.weights.made == 1
    try:
        assert SUMMARY in other.summary

        async def both() -> list[list[list[int]]]:
            return list(await asyncio.gather(*(one_after_the_other(each.engine) for each in (built, other))))

        assert run(both()) == [expected, expected]
    finally:
        end(other)
    assert run(one_after_the_other(built.engine)) == expected


@pytest.mark.parametrize(
    ("recorder", "why"),
    [("has no memory", "rank 1: RuntimeError: no memory for a graph"), ("has none", None)],
)
def test_what_one_rank_cannot_capture_no_rank_replays(
    ranks: Ranks,
    built: BuiltEngine,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    recorder: str,
    why: str | None,
) -> None:
    ranks.says(recorder)
    try:
        with caplog.at_level("INFO"):
            other = ranks.build(max_queued_requests=8 + len(recorder))
    finally:
        ranks.says("counts")
    try:
        assert "CUDA graphs" not in other.summary and "2 ranks" in other.summary
        if why is not None:
            assert f"no CUDA graphs, the plain forward runs: LoadFailed: {why}" in caplog.text
        before = ranks.recorders.replays
        assert run(one_after_the_other(other.engine)) == expected
        assert ranks.recorders.replays == before
    finally:
        end(other)


def test_a_rank_that_is_killed_between_replays_ends_the_streams_with_an_error(ranks: Ranks, built: BuiltEngine) -> None:
    """The last test of these ranks."""
    (child,) = built.lease.value.weights.value.ranks.leader._other_ranks._children  # type: ignore[union-attr]
    before, reached, gate = ranks.recorders.replays, threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        if ranks.recorders.replays > before + 5:
            reached.set()
            assert gate.wait(30)

    async def scenario() -> None:
        readers = [
            asyncio.create_task(collect(built.engine, [EngineRequest(prompt_of(9, number), greedy(200))]))
            for number in range(3)
        ]
        await until(reached.is_set, "replays")
        os.kill(child.process.pid, signal.SIGKILL)
        gate.set()
        for reader in readers:
            event = (await asyncio.wait_for(reader, 30))[0]
            assert event.finish_reason is FinishReason.ERROR
            assert isinstance(event.error, GenerationFailed) and "RanksLost" in event.error.message
        assert not built.engine.alive

    before_each_forward(built.engine, hold)
    try:
        run(scenario())
    finally:
        gate.set()
