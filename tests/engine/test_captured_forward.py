"""Engines whose decode steps are captured: the tokens of ``generate``, whatever comes and goes between the replays.

A tape stands for the device that captures: see ``tests.engine.tape``.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.cuda_gathered import gathered_attention
from mlserver_torch_stream.engine.batching import CapturedForwards
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.checks.forward_choice import ForwardChoice
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.fingerprint import weights_key
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.loading.model_files import locate
from mlserver_torch_stream.engine.model import ModelLoad, prepare
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, read_stages
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from mlserver_torch_stream.settings import parse_settings
from tests.engine.emulated import laid_out
from tests.engine.tape import TapeRecorder
from tests.engine.tiny import (
    CONTEXT,
    batcher_over,
    byte_tokenizer,
    greedy,
    prompt_of,
    reference,
    run,
    running,
    tiny_model,
    tokens_of,
    until,
)

REQUESTS = [(prompt_of(3 + 5 * number, number), 12 + 3 * number) for number in range(6)]


class Recorders:
    """The resources of a process whose CPU can capture. ``made`` are the recorders that were asked for."""

    def __init__(self) -> None:
        self.resources = ProcessResources()
        self.resources.capture_on = self._make
        self.made: list[TapeRecorder] = []

    def _make(self, kind: str) -> TapeRecorder:
        self.made.append(TapeRecorder())
        return self.made[-1]

    @property
    def replays(self) -> int:
        return sum(each.replays for each in self.made)


def captured(
    model: PreTrainedModel, recorders: Recorders, pipeline: Pipeline | None = None, **options: Any
) -> ContinuousBatcher:
    """A batcher whose forward is made over its cache, as the factory makes it."""
    forward = ModelForward(model, attention=gathered_attention)
    sequences = options.setdefault("max_num_seqs", 4)
    forwards = CapturedForwards(model, forward, sequences, CONTEXT, pipeline, recorders.resources)
    batcher = batcher_over(model, forward_over=forwards.over, pipeline=pipeline, **options)
    assert forwards.description == f"CUDA graphs of up to {sequences} sequences, "
    return batcher


async def one_after_the_other(engine: EngineCore) -> list[list[int]]:
    """Each request joins while the others decode; most have left before the last."""
    sequences = []
    for prompt, count in REQUESTS:
        before = engine.stats().generation_tokens
        sequences.append(asyncio.create_task(tokens_of(engine, prompt, greedy(count))))
        await until(lambda before=before: engine.stats().generation_tokens >= before + 4, "tokens of the others")  # type: ignore[misc]
    return [await each for each in sequences]


@pytest.mark.parametrize(
    "family", ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "gpt_oss"))]
)
def test_sequences_that_join_and_leave_with_prompts_in_between(family: str) -> None:
    model, recorders = tiny_model(family), Recorders()
    expected = [reference(model, *request) for request in REQUESTS]
    batcher = captured(model, recorders)
    before = recorders.replays
    with running(model, batcher=batcher) as engine:
        assert run(one_after_the_other(engine)) == expected
    assert recorders.replays > before + 20


def test_sequences_that_are_preempted_and_computed_again() -> None:
    model, recorders = tiny_model("llama"), Recorders()
    expected = [reference(model, *request) for request in REQUESTS]
    token_bytes = 2 * 3 * 2 * 8 * 4  # keys and values of three layers with two heads of 8 floats
    batcher = captured(model, recorders, cache_bytes=64 * token_bytes)
    with running(model, batcher=batcher) as engine:

        async def scenario() -> list[list[int]]:
            return list(await asyncio.gather(*(tokens_of(engine, prompt, greedy(count)) for prompt, count in REQUESTS)))

        assert run(scenario()) == expected
        assert engine.stats().num_preemptions > 0


def test_stages_that_each_replay_a_part() -> None:
    model, recorders = laid_out(tiny_model("llama"), 3), Recorders()
    expected = [reference(model, *request) for request in REQUESTS]
    batcher = captured(model, recorders, Pipeline(read_stages(model)))
    before = recorders.replays
    with running(model, batcher=batcher) as engine:
        assert run(one_after_the_other(engine)) == expected
    assert recorders.replays > before + 60


def test_forwards_that_must_not_overlap_in_the_engines_own_cache_are_not_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, recorders = laid_out(tiny_model("llama"), 2), Recorders()
    pipeline = Pipeline(read_stages(model))

    def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor if pipeline._position is None else torch.zeros_like(tensor)

    pipeline.bring = bring  # type: ignore[method-assign]
    forward = ModelForward(model, attention=gathered_attention)
    forwards = CapturedForwards(model, forward, 4, CONTEXT, pipeline, recorders.resources)
    with caplog.at_level(logging.INFO):
        batcher_over(model, forward_over=forwards.over, pipeline=pipeline)
    assert forwards.description == ""
    assert "no CUDA graphs, the plain forward runs: logits of forwards that overlap differ" in caplog.text


def test_a_new_cache_gets_steps_of_its_own() -> None:
    """As after a death: the captured steps of the lost batcher hold the addresses of its cache."""
    model, recorders = tiny_model("llama"), Recorders()
    forward = ModelForward(model, attention=gathered_attention)
    forwards = CapturedForwards(model, forward, 4, CONTEXT, None, recorders.resources)
    caches: list[PagedCache] = []

    def over(cache: PagedCache) -> Any:
        caches.append(cache)
        return forwards.over(cache)

    for number in range(2):
        batcher = batcher_over(model, forward_over=over)
        before = [each.replays for each in recorders.made]
        with running(model, batcher=batcher) as engine:
            assert run(tokens_of(engine, prompt_of(7), greedy(12))) == reference(model, prompt_of(7), 12)
        replayed = [now.replays > was for now, was in zip(recorders.made, before, strict=True)]
        assert replayed == [False] * number + [True]
    assert caches[0] is not caches[1]


@pytest.mark.parametrize("fast_path", ["auto", "off"])
def test_an_engine_captures_over_its_own_cache_and_says_so(fast_path: str, tmp_path: Path) -> None:
    model, recorders = tiny_model("llama"), Recorders()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    extra = {"threads": 1, "fast_path": fast_path, "max_num_seqs": 4, "kv_cache_memory": "1MiB"}
    resolved = parse_settings(str(tmp_path), extra, environ={})
    # What computes on CPUs are kernels whose calls no tape sees.
    plain = parse_settings(str(tmp_path), {**extra, "fast_path": "off"}, environ={})
    prepared = prepare(locate(plain), ModelLoad(plain, 1, recorders.resources))
    choice = ForwardChoice(ModelForward(prepared.weights.model, attention=gathered_attention), "gathered keys")
    object.__setattr__(prepared, "choice", choice)
    lease = recorders.resources.weights.lease(weights_key(resolved, 1), lambda: prepared)
    built = build_engine(resolved, resources=recorders.resources)
    try:
        assert ("CUDA graphs of up to 4 sequences" in built.summary) is (fast_path == "auto")
        before = recorders.replays
        assert run(tokens_of(built.engine, prompt_of(9), greedy(10))) == reference(model, prompt_of(9), 10)
        assert (recorders.replays > before) is (fast_path == "auto")
    finally:
        lease.end()
        if built.give_back():
            built.shutdown()
