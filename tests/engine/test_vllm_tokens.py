"""Through this package, vLLM gives the same tokens as alone: greedy answers, adapters in one batch, two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import SamplingParameters
from tests.engine.real_vllm import (
    ADAPTER_RANK,
    FAMILIES,
    NEEDS_PEFT,
    NEEDS_VLLM,
    UNLIKELY_S,
    build,
    peft_alone,
    save_tiny,
    smollm2,
    vllm_alone,
)
from tests.engine.tiny import collect, run
from tests.engine.tiny_models import prompt_of

pytestmark = NEEDS_VLLM
_PROMPTS = [list(prompt_of(5 + 3 * number, number)) for number in range(20)]
_COUNT = 64


async def _tokens(built: BuiltEngine, prompt: Sequence[int], count: int, adapter: str | None = None) -> list[int]:
    params = SamplingParameters(max_tokens=count, ignore_eos=True)
    event = (await collect(built.engine, [EngineRequest(tuple(prompt), params, adapter=adapter)]))[0]  # type: ignore[arg-type]
    assert event.error is None, event.error
    return list(event.token_ids)


def _one_by_one(built: BuiltEngine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    async def ask() -> list[list[int]]:
        return [await _tokens(built, prompt, _COUNT) for prompt in prompts]

    try:
        answers: list[list[int]] = run(ask(), UNLIKELY_S)
        return answers
    finally:
        assert built.give_back()
        built.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of the model of a family."""
    place = tmp_path_factory.mktemp("models")
    return cache(lambda name: smollm2() if name == "smollm2" else save_tiny(name, place / name))


@pytest.fixture(scope="module")
def alone(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[int]]]:
    """A function that returns vLLM's own answers for a model."""
    return cache(lambda name: vllm_alone(models(name), _PROMPTS, _COUNT, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", [*FAMILIES, "smollm2"])
def test_greedy_answers_are_those_of_vllm_alone(
    name: str, models: Callable[[str], Path], alone: Callable[[str], list[list[int]]]
) -> None:
    folder = models(name)
    with ThreadPoolExecutor() as pool:  # each has one thread, on a core of its own
        expected = pool.submit(alone, name)
        answers = _one_by_one(build(folder), _PROMPTS)
    assert [len(answer) for answer in answers] == [_COUNT] * len(_PROMPTS)
    assert answers == expected.result()


def test_two_ranks_give_the_tokens_of_one_and_have_the_defaults_of_vllm_serve(
    models: Callable[[str], Path], alone: Callable[[str], list[list[int]]]
) -> None:
    built = build(models("llama"), {"threads": 2}, tensor_parallel_size=2, max_num_seqs=None)
    assert built.engine.info.max_num_seqs == 256  # 128 for each rank on CPUs
    assert _one_by_one(built, _PROMPTS[:5]) == alone("llama")[:5]


@NEEDS_PEFT
def test_adapters_and_the_base_in_one_batch_give_the_tokens_of_peft(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = peft_alone(models("llama"), ["a", "b"], _PROMPTS[0], 16, tmp_path)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    folders = {name: str(tmp_path / name) for name in "ab"}
    built = build(models("llama"), {"lora_modules": folders}, enable_lora=True, max_lora_rank=ADAPTER_RANK, max_loras=2)

    async def together() -> list[list[int]]:
        with pytest.raises(InvalidInput, match="at most 2 adapters can be loaded; set a larger max_loras"):
            await built.adapters.load("c", folders["a"])  # type: ignore[union-attr]
        return list(await asyncio.gather(*(_tokens(built, _PROMPTS[0], 16, name or None) for name in expected)))

    try:
        assert run(together(), UNLIKELY_S) == list(expected.values())
    finally:
        assert built.give_back()
        built.shutdown()
