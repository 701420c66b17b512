"""Milliseconds of a decode step and of a prefill: our kernels, transformers' forward, and that with linear layers laid
out for the CPU, in turn in one run.

    python benchmarks/forwards.py [MODEL] [--contexts 160] [--rows 1 4 16 32] [--page-sizes 16] [--rounds 3]
        [--threads N] [--ours-only] [--weights auto packed int8 int4] [--cpu-time]

Drives the forwards alone: no scheduler, no sampling, no server. Several page sizes and several values of the setting
``weights`` are columns of their own. A sequence's pages lie in no order, as they do after hours of service. CPU time of
one thread is comparable beside other work, too.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed
from mlserver_torch_stream.engine.loading.loader import load_weights
from mlserver_torch_stream.engine.loading.model_files import locate, locate_packed
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.settings import parse_settings

DECODE_STEPS = 12
PREFILL_CHUNK = 512
DENSE = ("auto", "int8", "int4")  # values of ``weights`` for which a model is loaded as it is


@dataclass(frozen=True)
class Column:
    """A forward, and the pages that it works on."""

    forward: Forward
    layout: CacheLayout
    page_size: int
    now: Callable[[], float] = time.perf_counter

    def tables(self, rows: int, length: int) -> tuple[PagedCache, list[tuple[list[int], ...]]]:
        """A cache for so many sequences of one length, and the block tables of each."""
        groups = self.layout.spec(self.page_size).groups
        each = -(-length // self.page_size)
        cache = PagedCache(self.layout, self.page_size, [rows * each] * len(groups), state_slots=0)
        order = [random.Random(0).sample(range(rows * each), rows * each) for _ in groups]
        return cache, [tuple(pages[row * each : (row + 1) * each] for pages in order) for row in range(rows)]

    def decode_ms(self, rows: int, context: int) -> float:
        """The fastest of a few steps: the machine may be shared. Keys and values are zeros, which take as long."""
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
            began = self.now()
            work()
            least = min(least, self.now() - began)
        return 1000 * least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded://smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[160])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2000])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--threads", type=int, default=read_host().threads)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--weights", nargs="+", choices=(*DENSE, "packed"), default=["auto"])
    parser.add_argument("--cpu-time", action="store_true", help="of the calling thread: give --threads 1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = parse_settings(options.model, {"dtype": options.dtype})
    now = time.thread_time if options.cpu_time else time.perf_counter
    with torch.inference_mode():
        model = load_weights(locate(settings), settings).model
        layout = CacheLayout(model.config)
        columns = {}
        for weights in options.weights:
            ours = our_forward(options, model, weights)
            for size in options.page_sizes:
                columns[f"ours, {weights}, {size}"] = Column(ours, layout, size, now)
        if not options.ours_only:
            packed = copy.deepcopy(model)
            columns["transformers"] = Column(ModelForward(model), layout, options.page_sizes[0], now)
            if pack_linears(packed):
                columns["laid out"] = Column(ModelForward(packed), layout, options.page_sizes[0], now)
        report(columns, options)


def our_forward(options: argparse.Namespace, model: Any, weights: str) -> NativeForward:
    settings = parse_settings(options.model, {"weights": weights})
    if weights in DENSE:
        return NativeForward(model, KernelOptions(options.threads, Path(settings.cache_dir)), ROUNDED.get(weights))
    files = locate_packed(settings)
    assert files is not None
    return NativeForward(
        load_packed(Path(files.location)).model, KernelOptions(options.threads, Path(settings.cache_dir))
    )


def report(columns: dict[str, Column], options: argparse.Namespace) -> None:
    print(f"{'':32}" + "".join(f"{name:>18}" for name in columns) + f"{'ratio':>8}")
    for context in options.contexts:
        for rows in options.rows:
            best = least(columns, options.rounds, lambda column: column.decode_ms(rows, context))  # noqa: B023
            line(f"decode, {rows} rows of {context}", best, f"{1000 * rows / min(best.values()):8.0f} tokens/s")
    for length in options.prompts:
        best = least(columns, options.rounds, lambda column: column.prefill_ms(length))  # noqa: B023
        line(f"prefill, {length} tokens", best, "")


def least(columns: dict[str, Column], rounds: int, measure: Callable[[Column], float]) -> dict[str, float]:
    best = dict.fromkeys(columns, float("inf"))
    for _ in range(rounds):
        for name, column in columns.items():
            best[name] = min(best[name], measure(column))
    return best


def line(what: str, best: dict[str, float], more: str) -> None:
    ours = min(ms for name, ms in best.items() if name.startswith("ours"))
    ratio = best.get("transformers", float("nan")) / ours
    print(f"{what:32}" + "".join(f"{ms:15.2f} ms" for ms in best.values()) + f"{ratio:8.2f}  {more}", flush=True)


if __name__ == "__main__":
    main()
