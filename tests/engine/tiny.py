"""Engines over tiny random models."""

from __future__ import annotations

import asyncio
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SameLogits, SelfCheckResult, check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.loading.loader import LoadedModel, complete, load_weights
from mlserver_torch_stream.engine.loading.locate import locate
from mlserver_torch_stream.engine.loading.tokenizer_files import load_tokenizer
from mlserver_torch_stream.engine.own_engine import torch_inference
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.queue import QueueLimits, SchedulerLimits
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.step.serial import SerialBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.watchdog import FairLock
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import GenerationRules, ModelInfo, SamplingParameters, TokenEvent
from tests.engine.tiny_models import (  # noqa: F401 tests import these from here, too
    CONTEXT,
    EOS,
    FAMILIES,
    SERIAL_FAMILIES,
    VOCAB,
    byte_tokenizer,
    prompt_of,
    reference,
    tiny_model,
)


def load_model(resolved: ResolvedSettings) -> LoadedModel:
    """Loads the model that ``resolved`` names, and its tokenizer, as an engine does."""
    files = locate(resolved)
    return complete(load_weights(files, resolved), load_tokenizer(files, resolved), resolved)


def cached_in_hub(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies a model's folder into an empty hub's cache as ``tiny/llama``, and turns the hub off.

    Returns the copied folder.
    """
    commit, place = "c0ffee" * 6 + "c0de", cache / "models--tiny--llama"
    snapshot = Path(shutil.copytree(model, place / "snapshots" / commit))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


_FOUND: dict[tuple[object, ...], SelfCheckResult] = {}


def findings_of(model: PreTrainedModel) -> SelfCheckResult:
    """Returns the result of the check at load, computed once in this process for all models of the same class and
    config.

    The check takes a tenth of a second, and hundreds of tests make an engine over the same few models. A model that a
    test has changed by hooks, or whose forward was replaced, is checked itself.
    """
    if any(each._forward_pre_hooks or each._forward_hooks or "forward" in vars(each) for each in model.modules()):
        return check_batching(model)
    places = frozenset((parameter.dtype, parameter.device) for parameter in model.parameters())
    key = type(model), model.config.to_json_string(use_diff=False), places
    if key not in _FOUND:
        found = check_batching(model)
        if found.problem is not None:  # of this model alone, perhaps
            return found
        _FOUND[key] = found
    return _FOUND[key]


def batcher_over(
    model: PreTrainedModel,
    findings: SelfCheckResult | None = None,
    *,
    prefill_tokens: int | None = 4,
    cache_bytes: int = 2**24,
    prefix_bytes: int = 0,
    max_num_seqs: int = 8,
    page_size: int = 4,
    rules: GenerationRules | None = None,
    vocab_size: int = VOCAB,
    **more: Any,
) -> ContinuousBatcher:
    """A batcher over the model, in the way that the check at load finds.

    ``more`` are options of ``ContinuousBatcher``.
    """
    with torch.inference_mode():
        findings = findings or findings_of(model)
    assert findings.spec is not None, findings.problem
    spec = replace(findings.spec, page_size=page_size)
    pages = tuple(cache_bytes // spec.page_bytes(group) for group in range(len(spec.groups)))
    limits = SchedulerLimits(
        max_num_seqs,
        prefill_tokens if findings.chunked else None,
        pages,
        cache_bytes,
        prefix_bytes,
        stages=1 if (pipeline := more.get("pipeline")) is None else pipeline.depth,
        whole_prompts=prefill_tokens is None or not findings.chunked,
    )
    cache = PagedCache(CacheLayout(model.config), page_size, pages, max_num_seqs)
    samplers = SamplerFactory(TextCodec(byte_tokenizer()), vocab_size, rules)
    forward = more.pop("forward", None) or Shown(ModelForward(model, findings.way), model)
    return ContinuousBatcher(forward, cache, samplers, limits, spec, **more)


def check_forward(
    model: PreTrainedModel, forward: Forward, *, expected: ExpectedLogits | None = None, **inputs: Any
) -> str | None:
    """Returns why ``forward`` must not replace the model's own; None if it has the model's logits.

    ``inputs`` are fields of ``SameLogits``.
    """
    return SameLogits[Forward](expected or ExpectedLogits(model), **inputs).problem(forward)


@contextmanager
def running(
    model: PreTrainedModel,
    *,
    batcher: Batcher | None = None,
    max_num_seqs: int = 8,
    max_queued_requests: int = 64,
    max_queued_tokens: int | None = None,
    queue_timeout: float | None = None,
    step_timeout: float | None = None,
    context: int = CONTEXT,
    fair_lock: FairLock | None = None,
    eos_token_ids: tuple[int, ...] = (),
    rebuild: Callable[[int], Batcher] | None = None,
    event_interval: tuple[int, float] = (1, math.inf),
    **more: Any,
) -> Iterator[EngineCore]:
    """An engine over the model, batched unless ``batcher`` is given, and shut down at the end.

    ``more`` are options of ``batcher_over``.
    """
    codec = TextCodec(byte_tokenizer())
    if batcher is None:
        batcher = batcher_over(model, max_num_seqs=max_num_seqs, **more)
        fits = (length for length in range(context, 0, -1) if batcher.refusal(1, length, length) is None)
        context = next(fits, 0)
    info = ModelInfo(vocab_size=VOCAB, max_model_len=context, max_num_seqs=max_num_seqs)
    queue_limits = QueueLimits(max_queued_requests, max_queued_tokens, queue_timeout, step_timeout=step_timeout)
    engine = EngineCore(
        *(batcher, codec, info, eos_token_ids),
        queue_limits=queue_limits,
        event_interval=event_interval,
        context=partial(torch_inference, 1),
        fair_lock=fair_lock,
        rebuild=rebuild,
        name="test",
    )
    try:
        yield engine
    finally:
        engine.shutdown()


async def collect(engine: EngineCore, requests: Sequence[EngineRequest]) -> dict[int, TokenEvent]:
    """Submits the requests together. Returns one event for each sequence, into which all of its events are merged."""
    merged: dict[int, TokenEvent] = {}
    async for event in engine.submit(requests):
        merged[event.index] = merged[event.index].merge(event) if event.index in merged else event
    return merged


async def tokens_of(engine: EngineCore, prompt: Sequence[int], params: SamplingParameters) -> list[int]:
    events = await collect(engine, [EngineRequest(tuple(prompt), params)])
    assert events[0].error is None, events[0].error
    return list(events[0].token_ids)


def greedy(count: int, **changes: Any) -> SamplingParameters:
    return SamplingParameters(max_tokens=count, ignore_eos=True, **changes)


def run(coroutine: Any, timeout: float = 180) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, timeout)

    return asyncio.run(bounded())


def run_with_engine(scenario: Callable[[EngineCore], Any], model: PreTrainedModel, **more: Any) -> None:
    """Runs the scenario with an engine over the model. ``more`` are options of ``running``."""
    with running(model, **more) as engine:
        run(scenario(engine))


def one_by_one(model: PreTrainedModel, **options: Any) -> SerialBatcher:
    """The batcher of a serial engine over the model."""
    return SerialBatcher(model, SamplerFactory(TextCodec(byte_tokenizer()), VOCAB), max_num_seqs=8, **options)


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Waits until the condition is true. Raises AssertionError after 40 s."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{what} never came")


def idle(engine: EngineCore) -> bool:
    stats = engine.stats()
    return stats.running_sequences == 0 and stats.waiting_requests == 0 and stats.kv_cache_bytes == 0


def decodes(engine: EngineCore, sequences: int) -> Callable[[list[list[int]]], bool]:
    """For ``Watch.stop_at``: true in steps that decode so many sequences and compute no prompt."""
    return lambda ids: [len(row) for row in ids] == [1] * sequences and engine.stats().running_sequences == sequences


class Shown:
    """A forward that tells the model's ``Watch`` to which sequences its packed tokens belong."""

    def __init__(self, forward: ModelForward, model: PreTrainedModel) -> None:
        self._forward = forward
        self._here = vars(model).setdefault("batch_of_thread", threading.local())

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        if self._forward.way is Way.PACKED:
            self._here.batch = batch
        try:
            return self._forward(batch, cache)
        finally:
            self._here.batch = None


class Watch:
    """Records the ids of each sequence in every call of a model's embedding. Can hold the engine there, or raise."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.calls: list[list[list[int]]] = []
        self.fail: Callable[[list[list[int]]], BaseException | None] = lambda ids: None
        self._stops: Callable[[list[list[int]]], bool] = lambda ids: False
        self._gate = threading.Event()
        self._stopped = threading.Event()
        self._here = vars(model).setdefault("batch_of_thread", threading.local())
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._see)

    @property
    def steps(self) -> list[list[list[int]]]:
        """The recorded calls that have one token for each sequence."""
        return [call for call in self.calls if all(len(ids) == 1 for ids in call)]

    def _see(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        batch: Batch | None = getattr(self._here, "batch", None)
        ids = args[0].tolist() if batch is None else [list(each.token_ids) for each in batch.sequences]
        self.calls.append(ids)
        if self._stops(ids):
            self._stopped.set()
            assert self._gate.wait(30), "nobody let the model go on"
        error = self.fail(ids)
        if error is not None:
            raise error

    def stop_at(self, stops: Callable[[list[list[int]]], bool] = lambda ids: True) -> None:
        """From now on, stops the engine's thread inside each forward for whose ids ``stops`` returns true."""
        self._stopped.clear()
        self._gate.clear()
        self._stops = stops

    async def stopped(self) -> None:
        """Waits until the engine's thread has stopped inside a forward."""
        await until(self._stopped.is_set, "the forward to stop at")

    async def hold(self) -> None:
        """Waits until the engine's thread has stopped inside its next forward."""
        self.stop_at()
        await self.stopped()

    def let_go(self) -> None:
        self._stops = lambda ids: False
        self._gate.set()

    def remove(self) -> None:
        self.let_go()
        self._hook.remove()


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[Watch]:
    watch = Watch(model)
    try:
        yield watch
    finally:
        watch.remove()


def in_step_with(loop: asyncio.AbstractEventLoop) -> Callable[[Any], None]:
    """For ``Watch.fail``: each forward waits until the readers on the loop have received all earlier events."""

    async def turns() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    return lambda ids: asyncio.run_coroutine_threadsafe(turns(), loop).result(30)


def spelled(text: str) -> list[int]:
    """Returns the ids of the text, one for each byte."""
    return [int(token) for token in byte_tokenizer().encode(text, add_special_tokens=False)]


@contextmanager
def dictated(model: PreTrainedModel, sequence: Sequence[int], prompt: int) -> Iterator[None]:
    """Makes the model say these tokens after any prompt of that length: a hook raises their logits."""

    def dictate(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        kept = kwargs["logits_to_keep"]  # of packed tokens, their places
        positions = kwargs["position_ids"][0, kept] if torch.is_tensor(kept) else kwargs["position_ids"][:, -1]
        logits = output.logits[0] if torch.is_tensor(kept) else output.logits[:, -1]
        for row, position in enumerate(positions.tolist()):
            logits[row, sequence[(position + 1 - prompt) % len(sequence)]] = 1e4
        return output

    hook = model.register_forward_hook(dictate, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
