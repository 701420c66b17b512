"""``make bench-gpu``: checks and measures whole engines on a GPU; docs/gpu.md has the results so far.

    python -m benchmarks.gpu [--checks tokens streams …] [--shape 1.5B] [--seconds 2] [--limit 540] [--json FILE]

Loads a Llama with random weights, made on the GPU, into this package's engine; its tokens have no meaning but can be
compared. The load itself compares the forward with the model's own logits. If a check finds wrong tokens, the script
ends with status 1. ``--dry`` runs the streams of a tiny model on the CPU, to try the script: its figures mean nothing.

It needs torch 2.11 or later and this package's engine, but neither MLServer nor a network, so that it suits a first run
on a new machine. Each line is also appended to the file ``--json`` at once, and after ``--limit`` seconds no other
check begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import machine
from benchmarks.shapes import SHAPES, Shape, llama_config
from mlserver_torch_stream.engine.api import Engine, EngineRequest
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.loading import loader
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import SamplingParameters

VOCABULARY = 128256  # as Llama 3's
DRY, DRY_VOCABULARY = Shape(64, 256, 2, 1, 1), 257
CONTEXT = 4096
STREAMS = (1, 16, 64, 128, 256)
DRY_STREAMS = (1, 3)
PROMPTS = (32, 128, 512, 2000)  # mixed, in turn
PATIENCE = 60.0  # seconds to wait until all rows run; then those that do run are measured
QUANTISED: dict[str, dict[str, Any]] = {
    "bitsandbytes, 4 bits": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"},
    "bitsandbytes, 8 bits": {"load_in_8bit": True},
    "torchao, int8": {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"},
    "torchao, int4": {"quant_method": "torchao", "quant_type": "Int4WeightOnlyConfig"},
    "torchao, fp8": {"quant_method": "torchao", "quant_type": "Float8DynamicActivationFloat8WeightConfig"},
}


@dataclass
class Bench:
    """The model, the devices, and the errors found so far, with the output of the checks."""

    folder: Path
    layers: int
    seconds: float
    gpu: str = "cuda:0"  # or "cpu"
    gpus: int = 1
    wrong: list[str] = field(default_factory=list)
    json: Path | None = None
    check: str = ""  # the name of the running one

    def tell(self, line: str, **figures: float) -> None:
        """Prints the line, and appends it with its figures to the file of JSON lines at once."""
        print(f"    {line}", flush=True)
        if self.json is not None:
            with self.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"check": self.check, "line": line, **figures}) + "\n")

    @property
    def streams(self) -> Sequence[int]:
        return DRY_STREAMS if self.gpu == "cpu" else STREAMS

    @contextmanager
    def engine(self, **extra: Any) -> Iterator[Engine]:
        placed = {} if "tensor_parallel_size" in extra else {"device_map": self.gpu}
        given = {"max_num_seqs": max(self.streams), "max_queued_requests": 1024, **placed, **extra}
        built = build_engine(parse_settings(str(self.folder), given, environ={}), resources=ProcessResources())
        self.tell(built.summary)
        try:
            yield built.engine
        finally:
            built.shutdown()

    def split(self, places: list[str]) -> dict[str, str]:
        """Returns a device map: the layers in equal parts, everything else on the first or last place."""
        at = {f"model.layers.{i}": places[i * len(places) // self.layers] for i in range(self.layers)}
        first, last = places[0], places[-1]
        return {"model.embed_tokens": first, "model.rotary_emb": first, **at, "model.norm": last, "lm_head": last}

    def lacks_gpus(self, what: str) -> bool:
        """Returns whether there are fewer than two GPUs; if so, prints that ``what`` is skipped."""
        if self.gpus < 2:
            self.tell(f"skipped: {what}: needs two GPUs, this machine has {self.gpus}")
        return self.gpus < 2

    def tokens(self, rows: int = 8, **extra: Any) -> list[list[int]]:
        """Returns the greedy tokens of an engine in float32."""
        with self.engine(dtype="float32", **extra) as engine:
            return asyncio.run(answers(engine, rows))

    def compare(self, what: str, got: list[list[int]], expected: list[list[int]]) -> None:
        same = got == expected
        self.tell(f"{what}: {'the same tokens' if same else 'OTHER TOKENS'}", same=same)
        if not same:
            self.wrong.append(what)

    def tell_speed(self, engine: Engine, *counts: int, what: str = "") -> list[float]:
        """Measures and prints the tokens/s at each number of streams, and returns them."""
        rates = [asyncio.run(speed(self, engine, rows)) for rows in counts]
        for rows, rate in zip(counts, rates, strict=True):
            step = 1000 * rows / max(rate, 0.001)
            line = f"{what}{rows} streams: {rate:.0f} tokens/s, {step:.1f} ms per step"
            self.tell(line, streams=rows, tokens_per_s=rate, step_ms=step)
        return rates


def prompt(row: int) -> tuple[int, ...]:
    return tuple((row * 31 + 7 * position) % 250 for position in range(PROMPTS[row % len(PROMPTS)]))


async def answers(engine: Engine, rows: int = 8, tokens: int = 24) -> list[list[int]]:
    async def one(row: int) -> list[int]:
        stream = engine.submit([EngineRequest(prompt(row), SamplingParameters(max_tokens=tokens, ignore_eos=True))])
        found: list[int] = []
        async for event in stream:
            if event.error is not None:
                raise event.error
            found += event.token_ids
        return found

    return list(await asyncio.gather(*map(one, range(rows))))


async def speed(bench: Bench, engine: Engine, rows: int, patience: float = PATIENCE) -> float:
    """Returns the tokens/s of rows of mixed lengths, measured while all rows are decoded, or as many as fit."""
    sampling = SamplingParameters(max_tokens=CONTEXT, ignore_eos=True)
    streams = [engine.submit([EngineRequest(prompt(row), sampling)]) for row in range(rows)]
    try:
        end = time.monotonic() + patience
        while engine.alive and engine.stats().running_sequences < rows and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if (found := engine.stats().running_sequences) < rows:
            bench.tell(f"only {found} of {rows} streams run at the same time", rows=found)
        began, tokens = time.monotonic(), engine.stats().generation_tokens
        await asyncio.sleep(bench.seconds)
        return (engine.stats().generation_tokens - tokens) / (time.monotonic() - began)
    finally:
        for stream in streams:
            stream.close()


def tokens(bench: Bench) -> None:
    """Compares greedy tokens of a batch of mixed lengths with transformers', computed one prompt at a time."""
    model = LlamaForCausalLM.from_pretrained(bench.folder, dtype=torch.float32).to(bench.gpu).eval()
    expected = []
    for row in range(len(PROMPTS)):
        ids = torch.tensor([prompt(row)], device=bench.gpu)
        made = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
        expected.append(made[0, ids.shape[1] :].tolist())
    del model
    bench.compare("compared with transformers", bench.tokens(len(PROMPTS)), expected)


def streams(bench: Bench) -> None:
    """Measures mixed lengths at 1 to 256 streams."""
    with bench.engine(dtype="bfloat16" if bench.gpu != "cpu" else "float32") as engine:
        bench.tell_speed(engine, *bench.streams)
    if bench.gpu != "cpu":
        most = torch.cuda.max_memory_allocated() / 2**30
        bench.tell(f"GPU memory at most: {most:.1f} GiB", gib=most)


def stages(bench: Bench) -> None:
    """Runs two stages on one GPU, and measures what the second one adds if one step does not fill the GPU."""
    expected = bench.tokens()
    twice = bench.split([bench.gpu, "cuda"])  # two names of one device are two stages
    for pipeline in ("off", "auto"):
        with bench.engine(device_map=twice, dtype="float32", pipeline=pipeline) as engine:
            bench.compare(f"two stages on one GPU, pipeline {pipeline}", asyncio.run(answers(engine)), expected)
            bench.tell_speed(engine, 64)


def several(bench: Bench) -> None:
    """Measures a device map over all GPUs: the gain of the pipeline, with as many rows per group as one group had."""
    if bench.lacks_gpus("a map over several GPUs"):
        return
    everywhere = bench.split([f"cuda:{index}" for index in range(bench.gpus)])
    bench.compare(f"{bench.gpus} GPUs", bench.tokens(device_map=everywhere), bench.tokens())
    rates = {}
    for pipeline in ("off", "auto"):
        with bench.engine(device_map=everywhere, dtype="bfloat16", pipeline=pipeline) as engine:
            rates[pipeline] = bench.tell_speed(engine, *STREAMS[1:], what=f"pipeline {pipeline}, ")
    for rows, in_turn, pipelined in zip(STREAMS[1:], rates["off"], rates["auto"], strict=True):
        gain = pipelined / in_turn
        bench.tell(f"{rows} streams: the pipeline is {gain:.2f} times as fast", streams=rows, gain=gain)


def ranks(bench: Bench) -> None:
    """Measures a model that tensor parallelism splits over two GPUs."""
    if bench.lacks_gpus("a split model"):
        return
    bench.compare("two ranks", bench.tokens(tensor_parallel_size=2), bench.tokens())
    with bench.engine(tensor_parallel_size=2, dtype="bfloat16") as engine:
        bench.tell_speed(engine, *STREAMS[:3])


def offload(bench: Bench) -> None:
    """Measures a device map over GPU and CPU, where accelerate copies the CPU's layers to the GPU at every step."""
    expected, half = bench.tokens(), bench.split([bench.gpu, "cpu"])
    for memory, pins in (("pageable", patch.object(loader, "pin_offloaded")), ("pinned", nullcontext())):
        with pins, bench.engine(device_map=half, dtype="float32") as engine:
            bench.compare(f"half of the layers on the CPU, {memory}", asyncio.run(answers(engine)), expected)
            bench.tell_speed(engine, 16, what=f"{memory}, ")


def quantised(bench: Bench) -> None:
    """Prints which quantised weights load or are refused, and their speed."""
    for name, config in QUANTISED.items():
        try:
            with bench.engine(dtype="bfloat16", quantization_config=config) as engine:
                bench.tell_speed(engine, 16, what=f"{name}, ")
        except LoadFailed as error:
            bench.tell(f"{name}: refused: {error}")


def transfer(bench: Bench) -> None:
    """Measures the upper limit of what pinned memory gains: copying 1 GiB from the host."""
    for pinned in (False, True):
        host = torch.ones(2**28, pin_memory=pinned)
        host.to(bench.gpu)
        torch.cuda.synchronize()
        began = time.monotonic()
        host.to(bench.gpu, non_blocking=pinned)
        torch.cuda.synchronize()
        rate = 1 / (time.monotonic() - began)
        bench.tell(f"{'pinned' if pinned else 'pageable'}: {rate:.1f} GiB/s", gib_per_s=rate)


CHECKS: dict[str, Callable[[Bench], None]] = {
    check.__name__: check for check in (tokens, streams, stages, several, ranks, offload, quantised, transfer)
}


def save_model(folder: Path, shape: Shape, vocabulary: int, device: str) -> None:
    """Makes random bfloat16 weights on the device, and writes them with a tokenizer of as many tokens."""
    torch.manual_seed(0)
    config = llama_config(shape, vocabulary, initializer_range=0.1)  # far from ties
    with torch.device(device):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    more = [f"token{number}" for number in range(vocabulary - len(alphabet) - 1)]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate([*alphabet, *more])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def run(bench: Bench, checks: Sequence[str], limit: float = math.inf) -> int:
    """Runs the checks, and begins none later than ``limit`` seconds after the first one. Returns the exit status."""
    end = time.monotonic() + limit
    for name in checks:
        bench.check = name
        if time.monotonic() > end:
            bench.tell(f"skipped, because the limit of {limit:g} s has passed; to run it: --checks {name}")
            continue
        print(f"{name}: {(CHECKS[name].__doc__ or name).splitlines()[0]}", flush=True)
        try:
            CHECKS[name](bench)
        except Exception as error:  # the other checks still run
            bench.wrong.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            bench.tell(bench.wrong[-1])
    for what in bench.wrong:
        print(f"wrong: {what}")
    return 1 if bench.wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5B", help="the model's size (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measured rate (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no check begins (%(default)s)")
    parser.add_argument("--json", type=Path, help="a file to which each line is appended at once")
    parser.add_argument("--dry", action="store_true", help="on the CPU: the streams of a tiny model")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("error: this machine has no CUDA device; --dry tries the script on the CPU", file=sys.stderr)
        return 2
    here = machine.describe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.dry:
            shape, bench, checks = DRY, Bench(folder, DRY.layers, 0.5, gpu="cpu", gpus=0), ["streams"]
        else:
            shape, checks = SHAPES[options.shape], options.checks
            bench = Bench(folder, shape.layers, options.seconds, gpus=torch.cuda.device_count())
        bench.json, bench.check = options.json, "machine"
        bench.tell(f"{here['date']}, {here.get('gpu', here['cpu'])}, torch {torch.__version__}")
        if busy := machine.warning(here):
            bench.tell(busy)
        save_model(folder, shape, DRY_VOCABULARY if options.dry else VOCABULARY, bench.gpu)
        return run(bench, checks, options.limit)


if __name__ == "__main__":
    sys.exit(main())
