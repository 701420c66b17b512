"""How near our kernels come to what this machine allows: the limits of its memory and units, and the share of them that
decode steps and prefills reach.

    python -m benchmarks.limits [MODEL] [--rows 1 4 16 32] [--prompts 128 512 2000] [--context 160] [--rounds 5]
        [--threads N]

MLSERVER_TORCH_STREAM_KERNEL names the variant of the kernels, as for a server. A limit is the longer of two times: that
of reading the weights, and the keys and values, once at the speed of memory; and that of all multiplications at the
peak of the unit that computes them. No program can be faster; both at once are not always possible.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.forwards import Column
from benchmarks.machine import describe, warning
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.loading.host_limits import read_host
from mlserver_torch_stream.engine.loading.loader import load_weights
from mlserver_torch_stream.engine.loading.model_files import locate
from mlserver_torch_stream.engine.native.compile_kernels import SOURCES
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.settings import parse_settings

SOURCE = Path(__file__).with_suffix(".cpp")
UNITS = ("matrix", "bf16", "fp32")  # the first one that is there multiplies bf16
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", f"-I{SOURCES}")


@dataclass(frozen=True)
class Limits:
    """``read``: bytes a second. ``peaks``: operations a second of each unit; 0: no such unit. Both of all threads."""

    read: float
    peaks: dict[str, float]

    def peak(self, bf16: bool) -> float:
        """Returns that of the unit that multiplies the weights."""
        return next(self.peaks[unit] for unit in (UNITS if bf16 else ("fp32",)) if self.peaks[unit])


@dataclass(frozen=True)
class Work:
    """What a step cannot do without: bytes that it reads, operations that it computes."""

    bytes: float
    operations: float

    def least_ms(self, limits: Limits, bf16: bool) -> tuple[float, str]:
        """Returns the milliseconds that it must take, and what limits it."""
        read, compute = self.bytes / limits.read, self.operations / limits.peak(bf16)
        return 1000 * max(read, compute), "memory" if read > compute else "the unit"


@dataclass(frozen=True)
class Model:
    """``projections``, ``head``: weights of the layers' products, and of the last one."""

    projections: int
    head: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    item: int  # bytes of a number

    def decode(self, rows: int, context: int) -> Work:
        weights = self.projections + self.head
        seen = rows * (context + 1) * self.layers * self.head_dim
        cached = 2 * seen * self.kv_heads * self.item
        return Work(weights * self.item + cached, 2 * rows * weights + 4 * seen * self.heads)

    def prefill(self, tokens: int) -> Work:
        pairs = tokens * (tokens + 1) / 2 * self.layers * self.head_dim
        operations = 2 * (tokens * self.projections + self.head) + 4 * pairs * self.heads
        return Work((self.projections + self.head) * self.item, operations)


def measure(variant: str, threads: int, seconds: float = 1.0, megabytes: int = 512) -> Limits:
    """Compiles the measurement for a variant of the kernels and runs it; the best of many short runs."""
    options = next(each.options for each in VARIANTS if each.name == variant)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.so"
        subprocess.run(["c++", *_FLAGS, *options, str(SOURCE), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    memory = torch.ones(threads, megabytes * 2**20 // threads // 256 * 256, dtype=torch.uint8)
    with ThreadPoolExecutor(threads) as pool:

        def best(function: Callable[[int], Any], done: Callable[[list[Any]], float]) -> float:
            list(pool.map(function, range(threads)))
            highest, end = 0.0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                began = time.perf_counter()
                results = list(pool.map(function, range(threads)))
                highest = max(highest, done(results) / (time.perf_counter() - began))
            return highest

        library.limit_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        read = best(lambda i: library.limit_read(memory[i].data_ptr(), memory.shape[1]), lambda _: memory.numel())
        peaks = {}
        for unit in (*UNITS, "int8"):
            compute = getattr(library, f"limit_{unit}")
            compute.argtypes, compute.restype = [ctypes.c_int64], ctypes.c_int64
            rounds = 1000 if unit == "matrix" else 200_000  # some milliseconds
            peaks[unit] = best(lambda _, compute=compute, rounds=rounds: compute(rounds), sum)  # type: ignore[misc]
    return Limits(read, peaks)


def model_of(config: Any, loaded: Any) -> Model:
    head = loaded.lm_head.weight
    layers = sum(weight.numel() for name, weight in loaded.named_parameters() if name.endswith("proj.weight"))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, dim)
    return Model(layers, head.numel(), *numbers, head.element_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded://smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2000])
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=read_host().threads)
    options = parser.parse_args()
    machine = describe()
    print(
        f"{machine['cpu']}, {options.threads} threads, {machine['date']}", *filter(None, [warning(machine)]), sep="\n"
    )
    torch.set_num_threads(options.threads)
    settings = parse_settings(options.model, {"dtype": "bfloat16"})
    with torch.inference_mode():
        loaded = load_weights(locate(settings), settings).model
        model, layout = model_of(loaded.config, loaded), CacheLayout(loaded.config)
        forward = NativeForward(loaded, options.threads, Path(settings.cache_dir))
        ours = Column(forward, layout, 16)
        variant = forward.variant.partition(",")[0]
        names = [each.name for each in runnable()]
        limits = measure(variant if variant in names else names[0], options.threads)
        print(f"kernels: {forward.variant}; memory {limits.read / 1e9:.1f} GB/s; ", end="")
        print(", ".join(f"{unit} {peak / 1e9:.0f} GFLOP/s" for unit, peak in limits.peaks.items() if peak))
        for rows in options.rows:
            took = min(ours.decode_ms(rows, options.context) for _ in range(options.rounds))
            report(f"decode, {rows} rows of {options.context}", took, model.decode(rows, options.context), limits)
        for tokens in options.prompts:
            took = min(ours.prefill_ms(tokens) for _ in range(options.rounds))
            report(f"prefill, {tokens} tokens", took, model.prefill(tokens), limits)


def report(what: str, took: float, work: Work, limits: Limits) -> None:
    least, by = work.least_ms(limits, bf16=True)
    print(f"{what:24} {took:9.2f} ms   limit {least:9.2f} ms by {by:8}   share {least / took:5.2f}", flush=True)


if __name__ == "__main__":
    main()
