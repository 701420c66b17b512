"""The choice of attention for transformers' forward depends on the pages' devices, and is equal on all ranks."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.checks.attention import choose_attention
from mlserver_torch_stream.engine.checks.forward_choice import with_attention
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import byte_tokenizer, greedy, prompt_of, reference, run, tiny_model, tokens_of


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("names", [["cuda:0"], ["cuda:0", "cuda:1"]])
def test_layers_on_several_gpus_attend_as_those_on_one(names: list[str], tmp_path: Path) -> None:
    """The model's layers are on a CPU, in float32; the refusal shows that varlen attention was tried."""
    model = tiny_model("llama")
    findings = check_batching(model)
    spec = findings.specs[torch.device("cpu")]
    verdict = choose_attention(model, replace(findings, specs={torch.device(name): spec for name in names}), tmp_path)
    assert verdict.candidate is None and "varlen attention" in verdict.reason


def test_pages_on_a_cpu_and_a_gpu_are_for_torch(tmp_path: Path) -> None:
    model = tiny_model("llama")
    findings = check_batching(model)
    spec = findings.specs[torch.device("cpu")]
    both = replace(findings, specs={torch.device(name): spec for name in ("cpu", "cuda:0")})
    assert choose_attention(model, both, tmp_path).reason == "pages are on cpu and cuda"


def test_ranks_whose_others_cannot_take_the_kernels_do_not_take_them_either(kernel_cache: Path) -> None:
    model = tiny_model("llama")
    findings, expected = check_batching(model), ExpectedLogits(model)
    assert "with attention kernels" in with_attention(expected, findings, kernel_cache).describe()
    asked: list[bool] = []

    def other_fails_at(question: int) -> None:
        asked.clear()

        def together(holds: bool) -> bool:
            asked.append(holds)
            return holds and len(asked) <= question

        forward = with_attention(expected, findings, kernel_cache, together=together)
        assert forward.describe() == "steps packed with torch's attention (another rank cannot use the kernels)"

    for question in (0, 1):
        other_fails_at(question)
        assert asked == [True] * (question + 1), "each rank is asked as often as the others"


@pytest.mark.slow
def test_ranks_on_cpus_attend_by_kernels(tmp_path: Path, kernel_cache: Path) -> None:
    model = tiny_model("gemma3_text")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    requests = [(prompt_of(3 + 5 * number, number), 12) for number in range(3)]
    expected = [reference(model, *request) for request in requests]
    settings = {"tensor_parallel_size": 2, "threads": 1, "kv_cache_memory": "8MiB", "cache_dir": str(kernel_cache)}
    built = build_engine(parse_settings(str(tmp_path), settings, environ={}), resources=ProcessResources())

    async def scenario() -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(built.engine, ids, greedy(count)) for ids, count in requests)))

    try:
        assert "with attention kernels" in built.summary
        assert run(scenario()) == expected
    finally:
        if built.give_back():
            built.shutdown()
