"""How near our kernels come to what this machine allows: the limits of its memory and units, and the share of them that
decode steps and prefills reach.

    python -m benchmarks.limits [MODEL] [--rows 1 4 16 32] [--prompts 128 512 2000] [--context 160] [--rounds 5]
        [--threads N] [--json [--weights FILE.gguf]]

MLSERVER_TORCH_STREAM_KERNEL names the variant of the kernels, as for a server. roofline.py says what a limit is. With
--json no forward is timed: it prints the limits of the machine and the sizes of the model, which ``make bench`` reads.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.forwards import Column
from benchmarks.machine import describe, warning
from benchmarks.roofline import INT8, UNITS, Limits, Model, Work
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.loading.loader import load_weights
from mlserver_torch_stream.engine.loading.model_files import locate
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.native.compile_kernels import SOURCES
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.settings import parse_settings

SOURCE = Path(__file__).with_suffix(".cpp")
_BF16 = 2  # bytes
_OTHER = 0.05  # of the projections: norms and biases
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", f"-I{SOURCES}")


class NotDense(Exception):
    """A model whose work roofline.py does not know."""


class LimitsProgram:
    """Measures this machine with a program compiled for a variant of the kernels, the best of many short runs each.

    Other guests of a host share its memory: what ``read_speed`` returns can change within a minute.
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
        """In bytes a second."""
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
    """``weight_bytes``: of the file that holds them packed. Raises NotDense."""
    config, head = model.config, getattr(model, "lm_head", None)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    layers = sum(size for name, size in sizes.items() if name.endswith("proj.weight"))
    other = sum(size for name, size in sizes.items() if not re.search(r"proj\.weight|embed|lm_head", name))
    if head is None or not layers or other > _OTHER * layers or any("experts" in name for name in sizes):
        raise NotDense(f"{config.model_type}: its shares are not computed, only those of dense decoders")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, dim)
    held = head.weight.numel() + layers
    return Model(layers, head.weight.numel(), *numbers, weight_bytes or held * _BF16)


def roofline(folder: str, threads: int, weights: Path | None = None) -> dict[str, Any]:
    """What ``roofline.share`` asks for, of the model in a folder, or of it packed in a GGUF file. Raises NotDense."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    dense = model_of(model, weights.stat().st_size if weights else None)
    limits = LimitsProgram(runnable()[0].name, threads).limits()
    return {"limits": asdict(limits), "model": asdict(dense), "unit": INT8 if weights else limits.bf16_unit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded://smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2000])
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=read_host().threads)
    parser.add_argument("--json", action="store_true", help="MODEL is a folder")
    parser.add_argument("--weights", type=Path, help="with --json: the model's GGUF file")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(roofline(options.model, options.threads, options.weights)))
    else:
        time_forwards(options)


def time_forwards(options: argparse.Namespace) -> None:
    machine = describe()
    print(
        f"{machine['cpu']}, {options.threads} threads, {machine['date']}", *filter(None, [warning(machine)]), sep="\n"
    )
    torch.set_num_threads(options.threads)
    settings = parse_settings(options.model, {"dtype": "bfloat16"})
    with torch.inference_mode():
        loaded = load_weights(locate(settings), settings).model
        model, layout = model_of(loaded), CacheLayout(loaded.config)
        forward = NativeForward(loaded, KernelOptions(options.threads, Path(settings.cache_dir)))
        ours = Column(forward, layout, 16)
        variant = forward.variant.partition(",")[0]
        names = [each.name for each in runnable()]
        program = LimitsProgram(variant if variant in names else names[0], options.threads)
        limits = program.limits()
        print(f"kernels: {forward.variant}; ", end="")
        print(", ".join(f"{unit} {peak / 1e9:.0f} GFLOP/s" for unit, peak in limits.peaks.items() if peak))

        def time_case(what: str, work: Work, step_ms: Callable[..., float], *sizes: int) -> None:
            """Memory is measured before and after the case, because its speed changes meanwhile."""
            before = program.read_speed()
            took = min(step_ms(*sizes) for _ in range(options.rounds))
            report(what, took, work, replace(limits, read=max(before, program.read_speed())))

        for rows in options.rows:
            work = model.decode(rows, options.context)
            what = f"decode, {rows} rows of {options.context}"
            time_case(what, work, ours.decode_ms, rows, options.context)
        for tokens in options.prompts:
            time_case(f"prefill, {tokens} tokens", model.prefill(tokens), ours.prefill_ms, tokens)


def report(what: str, took: float, work: Work, limits: Limits) -> None:
    least, by = work.least_ms(limits, limits.bf16_unit())
    print(f"{what:24} {took:9.2f} ms   limit {least:9.2f} ms by {by:8}", end="")
    print(f"   share {least / took:5.2f}   memory {limits.read / 1e9:5.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
