"""Microseconds of an attention of one layer over pages: our kernels, torch's attention over gathered keys, and torch's
own over keys that lie densely, which no cache of unlike lengths gives it.

    python benchmarks/page_attention.py [--threads N] [--dtype bfloat16] [--page-size 16] [--layers 8]

Each call takes another layer's pages, as a forward does, so that keys come from memory where the layers outgrow the
caches. Takes under two minutes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import describe, warning
from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, batch_tensors
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.native.native_attention import NativeAttention

HEADS = {"9 heads of 64, 3 of keys": (9, 3, 64), "32 heads of 128, 8 of keys": (32, 8, 128)}
SECONDS = 1.0  # of each figure


@dataclass(frozen=True)
class Work:
    rows: int
    start: int  # tokens of each in the pages before the step
    count: int  # new ones of each

    def __str__(self) -> str:
        new = "a token" if self.count == 1 else f"{self.count} tokens"
        return f"{self.rows} x {new} at {self.start + self.count} keys"


WORK = (Work(32, 179, 1), Work(32, 479, 1), Work(1, 479, 1), Work(1, 3999, 1), Work(1, 0, 2000), Work(4, 500, 128))


class Layers:
    """The pages, queries and dense keys of the layers of one batch."""

    def __init__(
        self, work: Work, shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, layers: int
    ) -> None:
        heads, kv_heads, dim = shape
        each = -(-(work.start + work.count) // page_size)
        pages = random.Random(0).sample(range(work.rows * each), work.rows * each)
        sequences = tuple(
            BatchSequence((0,) * work.count, work.start, (pages[row * each : (row + 1) * each],))
            for row in range(work.rows)
        )
        self.batch: BatchTensors = batch_tensors(Batch(sequences), page_size, 1, torch.device("cpu"))
        self.options = AttentionOptions(dim**-0.5)
        self.work = work
        pool = (work.rows * each, kv_heads, page_size, dim)
        dense = (work.rows, kv_heads, work.start + work.count, dim)
        numbers = [torch.randn(pool).to(dtype) for _ in range(2)]
        self.pages = [LayerPages(0, pool[0], page_size, *(part.clone() for part in numbers)) for _ in range(layers)]
        keys, values = (torch.randn(dense).to(dtype) for _ in range(2))
        self.dense = [(keys.clone(), values.clone()) for _ in range(layers)]
        self.query = torch.randn(work.rows * work.count, heads, dim).to(dtype)
        self.new = torch.randn(2, work.rows * work.count, kv_heads, dim).to(dtype)

    def by(self, attention: Callable[..., torch.Tensor], layer: int) -> None:
        attention(self.query, self.pages[layer], self.batch, self.options)

    def densely(self, layer: int) -> None:
        keys, values = self.dense[layer]
        query = self.query.unflatten(0, (self.work.rows, self.work.count)).transpose(1, 2)
        causal = self.work.count > 1 and self.work.start == 0
        scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)

    def write(self, writer: Callable[..., None], layer: int) -> None:
        writer(self.pages[layer], *self.new, self.batch.slots[0])


def microseconds(call: Callable[[int], None], layers: int) -> float:
    """The fastest round of all layers, each layer's share: the machine may be shared."""
    call(0)
    best, end = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        for layer in range(layers):
            call(layer)
        best = min(best, time.perf_counter() - began)
    return 1e6 * best / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kernels", type=Path, default=Path.home() / ".cache" / "mlserver-torch-stream")
    options = parser.parse_args()
    described = describe()
    print(described)
    if (busy := warning(described)) is not None:
        print(busy)
    torch.set_num_threads(options.threads)
    native, gathered = NativeAttention(options.kernels), GatheredAttention()
    print(f"{native.describe()}: {options.threads} threads; {options.dtype}, pages of {options.page_size}")
    print("us a layer: kernels, torch over gathered keys, torch over dense keys; writing: kernels, torch")
    with torch.inference_mode():
        for name, shape in HEADS.items():
            print(name)
            for work in WORK:
                count = options.layers if work.count == 1 else 2
                layers = Layers(work, shape, getattr(torch, options.dtype), options.page_size, count)
                figures = (
                    lambda layer, all=layers: all.by(native, layer),
                    lambda layer, all=layers: all.by(gathered, layer),
                    lambda layer, all=layers: all.densely(layer),
                    lambda layer, all=layers: all.write(native.write, layer),
                    lambda layer, all=layers: all.write(LayerPages.write, layer),
                )
                print(f"  {work!s:32}", *(f"{microseconds(call, count):10.0f}" for call in figures))


if __name__ == "__main__":
    main()
