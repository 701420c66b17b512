"""Milliseconds of a decode step and of a prefill: our kernels, transformers' forward, and that with linear layers laid
out for the CPU, in turn in one run.

    python benchmarks/forwards.py [MODEL] [--context 160] [--threads N] [--rounds 3] [--ours-only]

Drives the forwards alone: no scheduler, no sampling, no server.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.loading.host_limits import read_host
from mlserver_torch_stream.engine.loading.loader import load_weights, locate
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.settings import parse_settings

ROWS = (1, 4, 16, 32)
PROMPTS = (128, 512, 2000)
DECODE_STEPS = 12
PREFILL_CHUNK = 512

Forward = Callable[[Any, RowCache], torch.Tensor]


def prefilled(forward: Forward, layout: CacheLayout, length: int, spare: int) -> RowCache:
    cache = RowCache(layout, capacity=length + spare)
    cache.begin_row()
    ids = [(7 * i) % 1000 + 5 for i in range(length)]
    for first in range(0, length, PREFILL_CHUNK):
        forward([ids[first : first + PREFILL_CHUNK]], cache)
    return cache


def batch_of(forward: Forward, layout: CacheLayout, rows: int, context: int, spare: int) -> RowCache:
    """Rows of one length: the slab's worst case for bandwidth, and no padding that only one side would pay for."""
    batch = RowCache(layout, rows=rows, capacity=context + spare)
    batch.join(prefilled(forward, layout, context, 0), rows)
    return batch


def decode_ms(forward: Forward, cache: RowCache) -> float:
    """The fastest of a few steps: the machine may be shared."""
    tokens = [[11 + row] for row in range(len(cache.lengths))]
    times = []
    for _ in range(DECODE_STEPS):
        began = time.perf_counter()
        forward(tokens, cache)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def prefill_ms(forward: Forward, layout: CacheLayout, length: int) -> float:
    began = time.perf_counter()
    prefilled(forward, layout, length, 0)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded://smollm2-135m-instruct")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--threads", type=int, default=read_host().threads)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ours-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = parse_settings(options.model, {"dtype": options.dtype})
    with torch.inference_mode():
        model = load_weights(locate(settings), settings).model
        layout = CacheLayout(model.config)
        forwards: dict[str, Forward] = {"ours": NativeForward(model, options.threads, Path(settings.cache_dir))}
        if not options.ours_only:
            forwards["transformers"] = ModelForward(model)
            packed = copy.deepcopy(model)
            if pack_linears(packed):
                forwards["laid out"] = ModelForward(packed)
        report(forwards, layout, options)


def report(forwards: dict[str, Forward], layout: CacheLayout, options: argparse.Namespace) -> None:
    print(f"{'':24}" + "".join(f"{name:>16}" for name in forwards) + f"{'ratio':>8}")
    spare = options.rounds * DECODE_STEPS
    for rows in ROWS:
        caches = {name: batch_of(one, layout, rows, options.context, spare) for name, one in forwards.items()}
        best = dict.fromkeys(forwards, float("inf"))
        for _ in range(options.rounds):
            for name, one in forwards.items():
                best[name] = min(best[name], decode_ms(one, caches[name]))
        line(f"decode, {rows} rows", best, f"{1000 * rows / best['ours']:8.0f} tokens/s")
    for length in PROMPTS:
        best = dict.fromkeys(forwards, float("inf"))
        for _ in range(options.rounds):
            for name, one in forwards.items():
                best[name] = min(best[name], prefill_ms(one, layout, length))
        line(f"prefill, {length} tokens", best, "")


def line(what: str, best: dict[str, float], more: str) -> None:
    ratio = best["transformers"] / best["ours"] if "transformers" in best else float("nan")
    print(f"{what:24}" + "".join(f"{ms:13.2f} ms" for ms in best.values()) + f"{ratio:8.2f}  {more}", flush=True)


if __name__ == "__main__":
    main()
