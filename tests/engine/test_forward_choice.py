"""What attends in transformers' forward: by the devices of the pages, and the same on all ranks."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.attention.cuda_choice import CudaAttention
from mlserver_torch_stream.engine.attention.native_attention import NativeAttention
from mlserver_torch_stream.engine.attention.torch_attention import torch_attention
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.checks.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.forward_choice import choose_attention, with_attention
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import byte_tokenizer, greedy, prompt_of, reference, run, tiny_model, tokens_of


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, where its compiler is loaded
def test_layers_on_several_gpus_attend_as_those_on_one(tmp_path: Path) -> None:
    model = tiny_model("llama")
    findings = check_batching(model)
    spec = findings.specs[torch.device("cpu")]
    for names in (["cuda:0"], ["cuda:0", "cuda:1"]):
        specs = {torch.device(name): spec for name in names}
        choice = choose_attention(model, replace(findings, specs=specs), tmp_path)
        assert isinstance(choice.attention, CudaAttention)


def test_ranks_whose_others_cannot_take_the_kernels_do_not_take_them_either(kernel_cache: Path) -> None:
    model = tiny_model("llama")
    findings, expected = check_batching(model), ExpectedLogits(model)
    forward, name = with_attention(expected, findings, kernel_cache)
    assert isinstance(forward.attention, NativeAttention) and "attention kernels" in str(name)
    asked: list[bool] = []

    def other_fails_at(question: int) -> None:
        asked.clear()

        def together(holds: bool) -> bool:
            asked.append(holds)
            return holds and len(asked) <= question

        forward, name = with_attention(expected, findings, kernel_cache, together=together)
        assert forward.attention is torch_attention and name == "torch's attention"

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
