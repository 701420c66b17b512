"""Batches of unlike lengths share a step of our kernels: the weights are read once, the logits stay the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from tests.engine.test_native import KNOWN, known_model, prefilled
from tests.engine.tiny import collect, greedy, prompt_of, reference, run, running, tiny_model

_NAMES = ["llama, tied, biases everywhere", "llama, odd sizes", "mistral, window of 6", "phi3"]
_LENGTHS = ((3, 5, 4), (60, 70), (200,))


def caches_of(model: PreTrainedModel, forward: NativeForward) -> list[RowCache]:
    made = []
    for lengths in _LENGTHS:
        batch = RowCache(CacheLayout(model.config), rows=len(lengths), capacity=max(lengths) + 8)
        for length in lengths:
            batch.join(prefilled(forward, model, list(prompt_of(length, length)), 32)[1])
        made.append(batch)
    return made


def tokens_for(cache: RowCache, step: int) -> list[list[int]]:
    return [[(7 * row + 11 * step) % 250] for row in range(len(cache.lengths))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", _NAMES)
def test_each_batch_gets_the_bits_that_it_gets_alone(name: str, dtype: torch.dtype, folder: Path) -> None:
    assert name in KNOWN
    model = known_model(name).to(dtype)
    with torch.inference_mode():
        forward = NativeForward(model, 2, folder)
        alone, shared = caches_of(model, forward), caches_of(model, forward)
        for step in range(3):
            expected = [forward(tokens_for(cache, step), cache).clone() for cache in alone]
            found = forward.together([(tokens_for(cache, step), cache) for cache in shared])
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [cache.lengths for cache in shared] == [cache.lengths for cache in alone]


def test_where_one_batch_has_no_memory_none_has_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = known_model("qwen2")
    with torch.inference_mode():
        forward = NativeForward(model, 2, folder)
        caches = caches_of(model, forward)
        parts = [(tokens_for(cache, 0), cache) for cache in caches]
        expected = [
            forward(tokens, cache).clone() for (tokens, _), cache in zip(parts, caches_of(model, forward), strict=True)
        ]

        def no_memory(queries: int) -> int:
            raise MemoryError("none")

        with monkeypatch.context() as patched:
            patched.setattr(caches[2].slabs[-1], "extend", no_memory)
            with pytest.raises(MemoryError):
                forward.together(parts)
        assert [cache.lengths for cache in caches] == [list(lengths) for lengths in _LENGTHS]
        found = forward.together(parts)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class _Spied(NativeForward):
    """Counts the batches of each step, and fails when told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: list[int] = []
        self.fails = False

    def together(self, parts: Any) -> Any:
        self.batches.append(len(parts))
        if self.fails:
            raise RuntimeError("together is too much")
        return super().together(parts)


@pytest.mark.parametrize("fails", [False, True])
def test_short_and_long_rows_take_steps_together_or_if_that_fails_alone(
    fails: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model = tiny_model("llama", max_position_embeddings=2048)
    prompts = [prompt_of(length, length) for length in (4, 1100, 9, 30)]
    forward = _Spied(model, 2, folder)
    forward.fails = fails
    with running(model, forward=forward, prefill_tokens=512, context=2048) as engine:
        requests = [EngineRequest(prompt, greedy(12), first_index=index) for index, prompt in enumerate(prompts)]
        sequences = run(collect(engine, requests))
    for index, prompt in enumerate(prompts):
        assert list(sequences[index].token_ids) == reference(model, prompt, 12)
    assert max(forward.batches) >= 2
    assert ("tried alone" in caplog.text) == fails


def test_a_step_of_several_batches_counts_as_one(folder: Path) -> None:
    model = tiny_model("llama")
    forward = _Spied(model, 2, folder)

    async def scenario(engine: EngineCore) -> None:
        streams = []
        for index in range(4):  # one after another, so that each finds no room in the batches before
            streams.append(engine.submit([EngineRequest(prompt_of(5, index), greedy(60))]))
            await anext(streams[-1])
        for stream in streams:
            async for _ in stream:
                pass

    with running(model, forward=forward) as engine:
        run(scenario(engine))
        assert max(forward.batches) >= 2
        assert engine.stats().decode_steps < 120
