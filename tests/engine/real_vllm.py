"""Finds vLLM's interpreter and models for the tests that run vLLM itself, and the processes that such a test starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.loading.locate import locate
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.vllm.messages import StartOrder
from mlserver_torch_stream.engine.vllm.vllm_process import WorkerCommand, cores_of_this_process
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny_models import byte_tokenizer, tiny_model

PYTHON, MODEL, PEFT = "VLLM_PYTHON", "VLLM_MODEL", "PEFT_FOLDER"
UNLIKELY_S = 1200.0  # vLLM takes minutes to start
# One thread: OpenMP's threads wait for each other, and beside other programs a step of several takes ten times longer.
SMALL = {"max_model_len": 256, "kv_cache_memory": "64MiB", "dtype": "float32", "threads": 1}
NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"{PYTHON} does not name an interpreter with vLLM"),
]
NEEDS_PEFT = pytest.mark.skipif(not os.environ.get(PEFT), reason=f"{PEFT} does not name a folder with PEFT")
# vLLM's attention for CPUs needs heads of 32.
_WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "qwen3": _WIDE,
    "gpt2": {"n_embd": 128, "hidden_size": 128, "n_head": 4},
}
ADAPTER_RANK = 8
_ALONE, _PEFT_ALONE = (Path(__file__).with_name(f"{name}_alone.py") for name in ("vllm", "peft"))
_EMBEDDED = "embedded://smollm2-135m-instruct"


def save_tiny(family: str, folder: Path) -> Path:
    """Writes a random model of the family with its tokenizer, and returns its folder."""
    tiny_model(family, **FAMILIES[family]).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@cache
def smollm2() -> Path:
    """The folder that ``VLLM_MODEL`` names, or the embedded SmolLM2 as safetensors."""
    if os.environ.get(MODEL):
        return Path(os.environ[MODEL])
    return Path(locate(parse_settings(_EMBEDDED, {"dtype": "float32"})).location)


def build(folder: Path, extra: dict[str, Any] | None = None, **vllm: Any) -> BuiltEngine:
    """An engine over vLLM. ``extra`` has settings beside ``vllm``; all other arguments are keys of ``vllm``."""
    arguments = {"enforce_eager": True, "max_num_seqs": 8, **vllm}
    settings = {**SMALL, "vllm": arguments, "vllm_python": os.environ[PYTHON], **(extra or {})}
    return build_engine(parse_settings(str(folder), settings), resources=ProcessResources())


def vllm_alone(model: Path, prompts: list[list[int]], count: int, place: Path) -> list[list[int]]:
    """Returns the greedy answers of vLLM's own ``LLM``, computed one prompt at a time."""
    job, answers = place / "job.json", place / "answers.json"
    job.write_text(json.dumps({"model": str(model), "prompts": prompts, "count": count}))
    command = WorkerCommand(os.environ[PYTHON], StartOrder({}), "alone", cores_of_this_process(os.cpu_count() or 1))
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    environment = {**command.environment(str(place)), **one_process}
    program = [os.environ[PYTHON], "-I", _ALONE, job, answers]  # -I: it would find modules of this folder
    subprocess.run(program, env=environment, check=True, timeout=2 * UNLIKELY_S)
    found: list[list[int]] = json.loads(answers.read_text())
    return found


def peft_alone(model: Path, names: list[str], prompt: list[int], count: int, place: Path) -> dict[str, list[int]]:
    """Writes random adapters into ``place``, each into the folder of its name, and returns PEFT's greedy answers by
    name; the base's name is empty.
    """
    job, answers = place / "peft.json", place / "peft-answers.json"
    asked = {"model": str(model), "folder": str(place), "names": names, "rank": ADAPTER_RANK}
    job.write_text(json.dumps({**asked, "prompt": prompt, "count": count}))
    program = [sys.executable, "-I", _PEFT_ALONE, os.environ[PEFT], job, answers]  # -I: as above
    subprocess.run(program, check=True, timeout=UNLIKELY_S)
    found: dict[str, list[int]] = json.loads(answers.read_text())
    return found


def descendants(pid: int) -> set[int]:
    """The descendants of a process, including those in sessions of their own."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            parents[int(status.parent.name)] = int(parent)
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {pid}


def named(pids: set[int], text: str) -> list[int]:
    """Returns those of the processes whose command line contains ``text``."""
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in pids}
    return sorted(pid for pid, line in lines.items() if line.exists() and text.encode() in line.read_bytes())
