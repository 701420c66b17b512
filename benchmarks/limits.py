"""The share of the machine's limits that our kernels reach in decode steps and prefills.

The limits are the speed of memory and the peaks of the CPU's units; roofline.py explains them. Only forwards are timed,
without scheduler, sampling or server: python benchmarks/bench.py --limits --help

MLSERVER_TORCH_STREAM_KERNEL names the variant of the kernels, as for a server. With --json no forward is timed: it
prints the limits of the machine and the sizes of the model, which ``make bench`` reads.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import machine
from benchmarks.roofline import INT8, UNITS, Limits, Model, Work
from benchmarks.servers import EMBEDDED
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed
from mlserver_torch_stream.engine.loading.loader import load_weights
from mlserver_torch_stream.engine.loading.locate import locate, locate_packed
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.native.compile_kernels import SOURCES
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.settings import parse_settings

SOURCE = Path(__file__).with_suffix(".cpp")
_BF16 = 2  # bytes
CONTEXT, ROUNDS = 160, 5
DECODE_STEPS = 12
PREFILL_CHUNK = 512
DENSE = ("auto", "int8", "int4")  # values of ``weights`` for which a model is loaded as it is
_OTHER = 0.05  # of the projections: norms and biases
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", f"-I{SOURCES}")


class NotDense(Exception):
    """roofline.py cannot compute the work of this model."""


class LimitsProgram:
    """Measures this machine with a program compiled for a variant of the kernels; takes the best of many short runs.

    Other guests of a host share its memory, so that the result of ``read_speed`` can change within a minute.
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
        """Returns bytes per second."""
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
    """``weight_bytes`` is the size of the file with packed weights. Raises NotDense."""
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
    """Returns the arguments of ``roofline.share`` for the model in a folder, or packed in a GGUF file.

    Raises NotDense.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    dense = model_of(model, weights.stat().st_size if weights else None)
    limits = LimitsProgram(runnable()[0].name, threads).limits()
    return {
        "limits": asdict(limits),
        "model": asdict(dense),
        "unit": limits.packed_unit() if weights else limits.bf16_unit(),
    }


@dataclass(frozen=True)
class Column:
    """A forward, and the layout of the pages on which it works."""

    forward: Any
    layout: CacheLayout
    page_size: int = 16

    def tables(self, rows: int, length: int) -> tuple[PagedCache, list[tuple[list[int], ...]]]:
        """Returns a cache for ``rows`` sequences of one length, and the block tables of each."""
        groups = self.layout.spec(self.page_size).groups
        each = -(-length // self.page_size)
        cache = PagedCache(self.layout, self.page_size, [rows * each] * len(groups), state_slots=0)
        order = [random.Random(0).sample(range(rows * each), rows * each) for _ in groups]
        return cache, [tuple(pages[row * each : (row + 1) * each] for pages in order) for row in range(rows)]

    def decode_ms(self, rows: int, context: int = CONTEXT) -> float:
        """Returns the time of the fastest of a few steps, as the machine may be shared. Keys and values are zeros.

        Zeros take as long as other values.
        """
        cache, tables = self.tables(rows, context + 1)
        batch = Batch(tuple(BatchSequence((11 + row,), context, table) for row, table in enumerate(tables)))
        self.forward(batch, cache)
        for layer in cache.layers.values():
            for pool in (layer.keys, layer.values):
                assert pool is not None
                pool.zero_()
        return self.least_ms(lambda: self.forward(batch, cache), DECODE_STEPS)

    def prefill_ms(self, length: int) -> float:
        cache, (table,) = self.tables(1, length)
        ids = [(7 * i) % 1000 + 5 for i in range(length)]
        chunks = [
            BatchSequence(ids[first : first + PREFILL_CHUNK], first, table, wanted=int(first + PREFILL_CHUNK >= length))
            for first in range(0, length, PREFILL_CHUNK)
        ]
        return self.least_ms(lambda: [self.forward(Batch((chunk,)), cache) for chunk in chunks], 1)

    def least_ms(self, work: Callable[[], object], times: int) -> float:
        least = float("inf")
        for _ in range(times):
            began = time.perf_counter()
            work()
            least = min(least, time.perf_counter() - began)
        return 1000 * least


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2000])
    parser.add_argument("--json", action="store_true", help="MODEL is a folder")
    parser.add_argument("--weights", type=Path, help="with --json: the model's GGUF file")
    parser.add_argument("--setting", nargs="+", choices=(*DENSE, "packed"), default=["auto"], help="values of weights")
    parser.add_argument("--beside-transformers", action="store_true", help="transformers' forward, timed in turn")
    options = parser.parse_args(arguments)
    threads = read_host().threads
    if options.json:
        print(json.dumps(roofline(options.model, threads, options.weights)))
    else:
        time_forwards(options, threads)
    return 0


def time_forwards(options: argparse.Namespace, threads: int) -> None:
    """Prints a line for each case, with the time of each column. The share is that of the first column."""
    described = machine.describe()
    print(f"{described['cpu']}, {threads} threads, {described['date']}", machine.warning(described) or "", sep="\n")
    torch.set_num_threads(threads)
    settings = parse_settings(options.model, {"dtype": "bfloat16"})
    with torch.inference_mode():
        loaded = load_weights(locate(settings), settings).model
        columns = {setting: _column(options.model, threads, loaded, setting) for setting in options.setting}
        if options.beside_transformers:
            columns["transformers"] = Column(ModelForward(loaded), CacheLayout(loaded.config))
        model, names = model_of(loaded), [each.name for each in runnable()]
        variant = columns[options.setting[0]].forward.variant.partition(",")[0]
        program = LimitsProgram(variant if variant in names else names[0], threads)
        limits = program.limits()
        print(", ".join(f"{unit} {peak / 1e9:.0f} GFLOP/s" for unit, peak in limits.peaks.items() if peak))
        cases: list[tuple[str, Work, Callable[[Column], float]]] = [
            *((f"decode, {rows} rows of {CONTEXT}", model.decode(rows, CONTEXT), partial(Column.decode_ms, rows=rows))
              for rows in options.rows),
            *((f"prefill, {tokens} tokens", model.prefill(tokens), partial(Column.prefill_ms, length=tokens))
              for tokens in options.prompts),
        ]  # fmt: skip
        for what, work, step in cases:
            before = program.read_speed()  # and after the case, because the memory's speed changes meanwhile
            rounds = [{name: step(column) for name, column in columns.items()} for _ in range(ROUNDS)]
            times = {name: min(each[name] for each in rounds) for name in columns}
            now = replace(limits, read=max(before, program.read_speed()))
            least, by = work.least_ms(now, now.bf16_unit())
            shown = "".join(f"{name:>13} {took:9.2f} ms" for name, took in times.items())
            share = least / next(iter(times.values()))
            print(f"{what:24}{shown}   limit {least:9.2f} ms by {by:8}", end="")
            print(f"   share {share:5.2f}   memory {now.read / 1e9:5.1f} GB/s", flush=True)


def _column(uri: str, threads: int, model: Any, setting: str) -> Column:
    settings = parse_settings(uri, {"weights": setting})
    if setting == "packed":
        files = locate_packed(settings)
        assert files is not None
        model = load_packed(Path(files.location)).model
    forward = NativeForward(model, KernelOptions(threads, Path(settings.cache_dir)), ROUNDED.get(setting))
    return Column(forward, CacheLayout(model.config))


if __name__ == "__main__":
    sys.exit(main())
