"""Measures the limits of this machine, and prints them and a model's sizes as one line of JSON for ``make bench``.

The limits are the speed of the memory and the peaks of the CPU's units; roofline.py says what they mean for a step. It
runs in a separate process, because it imports torch: ``python -m benchmarks.limits MODEL``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.roofline import INT8, UNITS, Limits, Model
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.native.compile_kernels import SOURCES
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable

SOURCE = Path(__file__).with_suffix(".cpp")
_BF16 = 2  # bytes
_OTHER = 0.05  # norms and biases may have this share of the projections' weights
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", f"-I{SOURCES}")


class NotDense(Exception):
    """Raised for a model that is not a dense decoder, so that roofline.py does not know how much it computes."""


class LimitsProgram:
    """Measures this machine with a program compiled for a variant of the kernels. Each limit is the best of many runs.

    Other virtual machines share the host's memory, so the result of ``read_speed`` can change within a minute.
    """

    def __init__(self, variant: str, threads: int, seconds: float = 1.0, megabytes: int = 512) -> None:
        options = next(each.options for each in VARIANTS if each.name == variant)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "limits.so"
            subprocess.run(["c++", *_FLAGS, *options, str(SOURCE), "-o", str(path)], check=True)
            self._library = ctypes.CDLL(str(path))
        self._threads, self._seconds = threads, seconds
        self._memory = torch.ones(threads, megabytes * 2**20 // threads // 256 * 256, dtype=torch.uint8)

    def limits(self) -> Limits:
        return Limits(self.read_speed(), {unit: self._peak(unit) for unit in (*UNITS, INT8)})

    def read_speed(self) -> float:
        """Returns how many bytes the threads read from memory in a second."""
        read, memory = self._library.limit_read, self._memory
        read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        return self._best(lambda i: read(memory[i].data_ptr(), memory.shape[1]), lambda _: memory.numel())

    def _peak(self, unit: str) -> float:
        compute = getattr(self._library, f"limit_{unit}")
        compute.argtypes, compute.restype = [ctypes.c_int64], ctypes.c_int64
        rounds = 1000 if unit == "matrix" else 200_000  # some milliseconds
        return self._best(lambda _: compute(rounds), sum)

    def _best(self, function: Callable[[int], Any], done: Callable[[list[Any]], float]) -> float:
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(function, range(self._threads)))
            highest, end = 0.0, time.perf_counter() + self._seconds
            while time.perf_counter() < end:
                began = time.perf_counter()
                results = list(pool.map(function, range(self._threads)))
                highest = max(highest, done(results) / (time.perf_counter() - began))
        return highest


def model_of(model: Any, weight_bytes: float | None = None) -> Model:
    """Returns a model's sizes. ``weight_bytes`` is the size of packed weights. Raises NotDense if it is not dense."""
    config, head = model.config, getattr(model, "lm_head", None)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    layers = sum(size for name, size in sizes.items() if name.endswith("proj.weight"))
    other = sum(size for name, size in sizes.items() if not re.search(r"proj\.weight|embed|lm_head", name))
    if head is None or not layers or other > _OTHER * layers or any("experts" in name for name in sizes):
        raise NotDense(f"{config.model_type}: is not a dense decoder, whose share of the limit could be computed")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, dim)
    held = head.weight.numel() + layers
    return Model(layers, head.weight.numel(), *numbers, weight_bytes or held * _BF16)


def roofline(folder: str, threads: int, weights: Path | None = None) -> dict[str, Any]:
    """Returns what ``roofline.share`` needs for a folder's model, or for its GGUF file. Raises NotDense."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    dense = model_of(model, weights.stat().st_size if weights else None)
    limits = LimitsProgram(runnable()[0].name, threads).limits()
    return {
        "limits": asdict(limits),
        "model": asdict(dense),
        "unit": limits.packed_unit() if weights else limits.bf16_unit(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what ``roofline`` returns as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("--weights", type=Path, help="the model's GGUF file")
    options = parser.parse_args(arguments)
    print(json.dumps(roofline(options.model, read_host().threads, options.weights)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
