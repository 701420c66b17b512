"""How much memory a load takes at most, anonymous and shared: hardly more than the weights, at every start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.engine.tiny_gguf import write_tiny_gguf

_LOAD = """
import json, sys, threading
from pathlib import Path
from tests.engine.test_record import loaded

def held():
    sizes = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024

def sample():
    while not done.wait(0.005):
        peaks.append(held())

peaks, done = [], threading.Event()
sampler = threading.Thread(target=sample)
sampler.start()
prepared, checks = loaded(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
done.set()
sampler.join()
print(json.dumps([max(peaks), prepared.choice.forward._weights.size, checks]))
"""
_BESIDE = 400 * 10**6  # imports, the tokenizer, activations of the checks


def peak(model: Path, cache: Path, **extra: object) -> tuple[int, int, dict[str, int]]:
    """Returns a load's peak of anonymous and shared memory, the size of the weights, and the checks by reason."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _LOAD, str(model), str(cache), json.dumps(extra)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr
    most, weights, checks = json.loads(run.stdout.splitlines()[-1])
    return most, weights, checks


@pytest.fixture
def cache(tmp_path: Path, folder: Path) -> Path:
    """A cache folder that contains only the kernels."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(folder / "kernels")
    return tmp_path / "cache"


def check_once_in_memory(model: PreTrainedModel, place: Path, cache: Path) -> None:
    """Compares the memory of the first start of a model, and of a later one, with the size of its weights."""
    model.save_pretrained(place)
    for expected in ({"new": 1}, {}):
        most, weights, checks = peak(place, cache, dtype="bfloat16")
        assert weights > 500 * 10**6 and checks == expected
        assert most < 1.15 * weights + _BESIDE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_packed_weights_are_in_memory_once_at_the_first_start_and_mapped_later(tmp_path: Path, cache: Path) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", kinds=("Q8_0",), hidden=2048, layers=14)
    first, weights, checks = peak(file, cache, weights="packed")
    assert weights > 500 * 10**6 and checks == {"new": 1}
    assert first < 1.15 * weights + _BESIDE
    later, _, checks = peak(file, cache, weights="packed")
    assert not checks and later < _BESIDE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_dense_weights_are_in_memory_once_at_each_start(stored: torch.dtype, tmp_path: Path, cache: Path) -> None:
    """A later start converts a file in float32 one matrix at a time; the first start converts all of it, and frees it.

    The model of the first start is transformers', whose layers are freed before those of the kernels are in memory.
    """
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    config = LlamaConfig(**sizes, num_attention_heads=16, max_position_embeddings=256)
    check_once_in_memory(LlamaForCausalLM(config).to(stored), tmp_path / "model", cache)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_experts_of_a_mixture_are_in_memory_once_at_each_start(tmp_path: Path, cache: Path) -> None:
    """transformers joins the experts' tensors in memory; a later start maps them in the file."""
    sizes = {"vocab_size": 512, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 6}
    config = Qwen3MoeConfig(**sizes, num_experts=32, num_attention_heads=16, head_dim=64, max_position_embeddings=256)
    check_once_in_memory(Qwen3MoeForCausalLM(config).to(torch.bfloat16), tmp_path / "model", cache)
