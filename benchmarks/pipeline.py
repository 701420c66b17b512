"""How busy a device map keeps its devices: tokens/s over N emulated devices, one after another and pipelined.

    python -m benchmarks.pipeline [--stages 2 4] [--rows 4] [--milliseconds 20] [--seconds 5]

A device is a stage that sleeps when it has computed, which needs no core, over a model so small that its own arithmetic
hardly counts. Two kinds: one whose time does not depend on its sequences, as where reading the weights takes it, and
one that takes its time for each sequence. The first keeps as many of them per batch and has N batches; the second
splits them. Efficiency is the gain divided by N. Everything but the devices is the engine as it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.machine import describe, warning
from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, read_stages
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.queue import SchedulerLimits
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import ModelInfo, SamplingParameters

VOCABULARY = 259
CONTEXT = 1024
Sleep = Callable[[int], float]  # seconds of a stage's work, by its sequences


def small_model(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def byte_codec() -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


class Devices:
    """Each sleeps when it has computed: in turn after its layer, pipelined where its stage waits for it."""

    def __init__(self, model: PreTrainedModel, sleep: Sleep, pipelined: bool) -> None:
        self._sleep = sleep
        self._here = threading.local()
        last = len(model.model.layers) - 1
        model.hf_device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": last, "lm_head": last}
        for index, layer in enumerate(model.model.layers):
            model.hf_device_map[f"model.layers.{index}"] = index
            layer.register_forward_hook(self._computed)
            if not pipelined:
                layer.register_forward_hook(self._finish)

    def _computed(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self._here.tokens = output.shape[0] * output.shape[1]

    def _finish(self, *_: Any) -> None:
        time.sleep(self._sleep(self._here.tokens))

    def pipeline(self, model: PreTrainedModel) -> Pipeline:
        return Pipeline([replace(stage, finish=self._finish) for stage in read_stages(model)])


def tokens_per_second(stages: int, rows: int, sleep: Sleep, seconds: float, pipelined: bool) -> float:
    """Once all sequences are being decoded."""
    model = small_model(stages)
    with torch.inference_mode():
        findings = check_batching(model)
    spec = findings.spec
    assert spec is not None, findings.problem
    devices = Devices(model, sleep, pipelined)
    codec = byte_codec()
    pages = (rows * spec.pages(CONTEXT),)
    cache = PagedCache(CacheLayout(model.config), spec.page_size, pages, 0)
    limits = SchedulerLimits(rows, 512, pages, pages[0] * spec.page_bytes(0), stages=stages if pipelined else 1)
    pipeline = devices.pipeline(model) if pipelined else None
    forward = ModelForward(model, findings.way)
    batcher = ContinuousBatcher(forward, cache, SamplerFactory(codec, VOCABULARY), limits, spec, pipeline=pipeline)
    engine = EngineCore(batcher, codec, ModelInfo(VOCABULARY, CONTEXT, rows), ())
    try:
        return asyncio.run(_measure(engine, rows, seconds))
    finally:
        engine.shutdown()


async def _measure(engine: EngineCore, rows: int, seconds: float) -> float:
    sampling = SamplingParameters(max_tokens=CONTEXT - 16, ignore_eos=True)
    streams = [engine.submit([EngineRequest(tuple(range(row, row + 8)), sampling)]) for row in range(rows)]
    try:
        while engine.stats().running_sequences < rows:
            await asyncio.sleep(0.01)
        began, tokens = await _next_step(engine)
        await asyncio.sleep(seconds)
        ended, more = await _next_step(engine)
        assert engine.stats().running_sequences == rows, "answers ended while they were measured: fewer seconds, please"
        return (more - tokens) / (ended - began)
    finally:
        for stream in streams:
            stream.close()


async def _next_step(engine: EngineCore) -> tuple[float, int]:
    """When one has ended, and the tokens so far; what lies between two of them is whole steps."""
    tokens = engine.stats().generation_tokens
    while engine.stats().generation_tokens == tokens:
        await asyncio.sleep(0.0005)
    return time.monotonic(), engine.stats().generation_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="that a stage takes for such a batch")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe()
    print(f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores")
    if busy := warning(machine):
        print(busy)
    per_batch = options.milliseconds / 1000
    per_row = per_batch / options.rows
    print(f"\n{'devices':>8} {'a device takes':>28} {'in turn':>14} {'pipelined':>14} {'gain':>6} {'efficiency':>11}")
    for stages in options.stages:
        rows = options.rows
        for kind, sleep, before, after in (
            (f"{options.milliseconds:g} ms per batch", lambda _: per_batch, rows, rows * stages),
            (f"{1000 * per_row:g} ms a sequence", lambda rows: per_row * rows, rows * stages, rows * stages),
        ):
            one = tokens_per_second(stages, before, sleep, options.seconds, pipelined=False)
            all_ = tokens_per_second(stages, after, sleep, options.seconds, pipelined=True)
            gain = all_ / one
            print(
                f"{stages:>8} {kind:>28} {one:>10.1f} t/s {all_:>10.1f} t/s {gain:>6.2f} {gain / stages:>10.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
