"""Computes the perplexity of a text, to compare the quality of forwards and weights rather than their speed.

    python -m tests.engine.perplexity [MODEL] [--text english.txt] [--window 512] [--threads N]

Each window of the text is one sequence. The text shipped is out of copyright: the first chapter of Austen's "Pride and
Prejudice", the beginning of Darwin's "On the Origin of Species", Lincoln's address at Gettysburg.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed
from mlserver_torch_stream.engine.loading.loader import LoadedModel, complete, load_weights
from mlserver_torch_stream.engine.loading.locate import locate, locate_packed
from mlserver_torch_stream.engine.loading.tokenizer_files import load_tokenizer
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.settings import parse_settings

TEXT = Path(__file__).parents[2] / "benchmarks" / "english.txt"
Windows = Sequence[Sequence[int]]
_PAGE, _STEP = 16, 64  # tokens


def windows(loaded: LoadedModel, text: str, length: int) -> list[list[int]]:
    """Splits the text into whole windows; each has one token more than ``length``, the last one to be predicted."""
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [ids[first : first + length + 1] for first in range(0, len(ids) - length, length)]


def perplexity_of_model(model: Any, rows: Windows) -> float:
    losses = []
    for row in rows:
        ids = torch.tensor(row)
        logits = model(ids[None, :-1], use_cache=False).logits[0]
        losses.append(cross_entropy(logits.float(), ids[1:]))
    return math.exp(torch.stack(losses).mean().item())


def perplexity_of_forward(forward: Forward, layout: CacheLayout, rows: Windows) -> float:
    """Computes the perplexity in steps of ``_STEP`` tokens, of which it requests all logits."""
    losses = []
    pages = range(-(-len(rows[0]) // _PAGE))
    cache = PagedCache(layout, _PAGE, [len(pages)] * len(layout.spec(_PAGE).groups), state_slots=0)
    for row in rows:
        for first in range(0, len(row) - 1, _STEP):
            ids = row[first : min(first + _STEP, len(row) - 1)]
            tables = tuple(list(pages) for _ in cache.groups)
            logits = forward(Batch((BatchSequence(ids, first, tables, wanted=len(ids)),)), cache).tensor
            losses.append(cross_entropy(logits, torch.tensor(row[first + 1 : first + 1 + len(ids)]), reduction="sum"))
    return math.exp(torch.stack(losses).sum().item() / sum(len(row) - 1 for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded://smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=read_host().threads)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = parse_settings(options.model, {"dtype": "bfloat16"})
    with torch.inference_mode():
        files = locate(settings)
        loaded = complete(load_weights(files, settings), load_tokenizer(files, settings), settings)
        rows = windows(loaded, options.text.read_text(encoding="utf-8"), options.window)
        print(f"{len(rows)} windows of {options.window} tokens", flush=True)
        best = perplexity_of_model(loaded.model, rows)
        print(f"{'transformers, bfloat16':40}{best:9.4f}", flush=True)

        def show(name: str, found: float) -> None:
            print(f"{name:40}{found:9.4f}{100 * (found / best - 1):+8.2f} %", flush=True)

        for name, rounded in (("bfloat16", None), *ROUNDED.items()):
            forward = NativeForward(loaded.model, KernelOptions(options.threads, settings.cache_dir), rounded)
            show(f"our kernels, {name}", perplexity_of_forward(forward, CacheLayout(loaded.model.config), rows))
        if settings.source.kind in ("embedded", "gguf"):
            asked = parse_settings(options.model, {"dtype": "bfloat16", "weights": "packed"})
            packed_files = locate_packed(asked)
            assert packed_files is not None
            packed = load_packed(Path(packed_files.location), packed_files.packed)
            forward = NativeForward(packed.model, KernelOptions(options.threads, settings.cache_dir))
            show("our kernels, packed", perplexity_of_forward(forward, CacheLayout(packed.model.config), rows))
            show("the file dequantised, float32", perplexity_of_model(packed.model, rows))


if __name__ == "__main__":
    main()
