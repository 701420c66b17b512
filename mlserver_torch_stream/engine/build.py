"""Builds a running engine from settings, and shares it: loads the model, and starts the engine over its batcher.

The functions block for as long as loading takes: call them in a thread.
"""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from mlserver_torch_stream.engine.api import AdapterSet, Engine
from mlserver_torch_stream.engine.batching import choose_batcher
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.fingerprint import engine_key, length_setting, weights_key
from mlserver_torch_stream.engine.loading.loader import LoadedModel, complete, load_tokenizer, set_threads
from mlserver_torch_stream.engine.loading.model_files import is_panic, locate, locate_packed
from mlserver_torch_stream.engine.loading.pinned import release_pinned
from mlserver_torch_stream.engine.machine import read_host, trim_heap
from mlserver_torch_stream.engine.model import ModelLoad, PreparedModel, give_back_weights, prepare
from mlserver_torch_stream.engine.replicas import Deaths, ReplicatedEngine, on_devices_of_their_own
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.queue import QueueLimits
from mlserver_torch_stream.engine.shared_pool import PROCESS, Lease, ProcessResources
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.vllm.vllm_engine import load_vllm
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import ModelInfo
from mlserver_torch_stream.work_threads import WorkCancelled

OnDeath = Callable[[BaseException], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine with its codec and the lease on its weights. vLLM's models have no lease: vLLM holds their weights
    itself.

    The replicas of a ``ReplicatedEngine`` are its ``parts``; the codec and the weights are those of the first replica.
    """

    engine: Engine
    codec: TextCodec
    summary: str  # one line for the log: the model, its devices and the size of the cache
    weights: Lease[PreparedModel] | None
    parts: tuple[RunningEngine, ...] = ()
    adapters: AdapterSet | None = None

    def stop(self, resources: ProcessResources) -> None:
        """Shuts the engine down and gives its weights and memory back. Blocks."""
        self.engine.shutdown()
        for part in self.parts or (self,):
            resources.release(part.codec)
            if part.weights is not None:
                give_back_weights(part.weights)


class BuiltEngine:
    """One user's share of a running engine, which other users may share."""

    def __init__(self, lease: Lease[RunningEngine], resources: ProcessResources) -> None:
        self.engine = lease.value.engine
        self.codec = lease.value.codec
        self.summary = lease.value.summary
        self.adapters = lease.value.adapters
        self.lease = lease
        self.resources = resources

    def give_back(self) -> bool:
        """Returns True if this was the last user and the engine has no later ones: the caller then shuts it down."""
        return self.lease.end()

    def shutdown(self) -> None:
        """Stops the engine and gives its memory back. Blocks."""
        self.lease.value.stop(self.resources)


def build_engine(
    resolved: ResolvedSettings, owner: str = "", on_death: OnDeath | None = None, resources: ProcessResources = PROCESS
) -> BuiltEngine:
    """Loads what the settings name and starts its engine. Raises LoadFailed with one line that says why.

    A cancelled load raises WorkCancelled after it has freed its memory.

    Engines share weights that are already loaded. The same ``owner`` with the same settings gets the same engine.
    """
    load = ModelLoad(resolved, set_threads(resolved.settings, read_host()), resources)
    key = engine_key(resolved, owner, weights_key(resolved, load.threads))
    return BuiltEngine(resources.engines.lease(key, lambda: _load(load, on_death)), resources)


def _load(load: ModelLoad, on_death: OnDeath | None) -> RunningEngine:
    settings = load.resolved.settings
    run = _run_vllm if settings.vllm is not None else _run if settings.replicas == 1 else _run_replicas
    running = None
    try:
        running = run(load, on_death)
    except WorkCancelled:
        pass
    except BaseException as error:
        if not is_panic(error):
            raise
        raise LoadFailed(f"cannot load {load.resolved.source.name}: its tokenizer is damaged: {error}") from error
    if running is None:
        reclaim_memory(load.resources)  # the error is gone, and so are the frames that held a part of the model
        raise WorkCancelled
    try:
        gc.collect()  # frees objects in reference cycles that the load left
        trim_heap()
    except BaseException:
        running.stop(load.resources)
        raise
    return running


def reclaim_memory(resources: ProcessResources = PROCESS) -> None:
    """Frees the memory that ended loads and engines leave: modules in reference cycles, free heap and CUDA blocks."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        release_pinned()
    trim_heap()


def _run_replicas(load: ModelLoad, on_death: OnDeath | None) -> RunningEngine:
    deaths = Deaths(load.resolved.settings.replicas, on_death)
    parts: list[RunningEngine] = []
    try:
        for settings in on_devices_of_their_own(load.resolved.settings):
            resolved = replace(load.resolved, settings=settings)
            parts.append(_run(replace(load, resolved=resolved), deaths.died))
    except BaseException:
        for part in parts:
            part.stop(load.resources)
        raise
    engines = [part.engine for part in parts]
    first = parts[0]
    summary = f"{len(parts)} replicas: {'; '.join(dict.fromkeys(part.summary for part in parts))}"
    return RunningEngine(ReplicatedEngine(engines), first.codec, summary, first.weights, tuple(parts))


def _run(load: ModelLoad, on_death: OnDeath | None) -> RunningEngine:
    resolved, resources = load.resolved, load.resources
    weights = weights_key(resolved, load.threads)
    files = locate_packed(resolved) or locate(resolved)
    key = weights, length_setting(resolved, files.location)
    parsers = resolved.settings.tool_parser, resolved.settings.reasoning_parser
    codec = TextCodec(tokenizer := load_tokenizer(files, resolved), *parsers)
    trim_heap()  # reading a vocabulary frees 29 MB; later blocks would fragment it

    def make() -> PreparedModel:
        return prepare(files, load)

    lease: Lease[PreparedModel] = resources.weights.lease(key, lambda: _in_thread_that_ends(load.threads, make))
    try:
        loaded = complete(lease.value.weights, tokenizer, resolved)
        codec.prepare_constraints()
        trim_heap()  # it leaves 20 MB of free blocks
        return _start(load, lease, loaded, codec, on_death)
    except BaseException:
        resources.release(codec)
        give_back_weights(lease)
        raise


def _run_vllm(load: ModelLoad, on_death: OnDeath | None) -> RunningEngine:
    resolved = load.resolved
    model = load_vllm(resolved, load.threads, load.resources)
    info = _info(
        model.codec,
        model.ready.vocab_size,
        model.ready.max_model_len,
        model.ready.max_num_seqs,
        model.default_sampling,
    )
    engine = EngineCore(
        model.batcher,
        model.codec,
        info,
        model.eos_token_ids,
        queue_limits=_queue_limits(resolved.settings),
        stream_interval=resolved.settings.stream_interval,
        rebuild=model.rebuild,
        on_death=on_death,
        name=resolved.source.name,
    )
    if model.adapters is not None:
        model.adapters.show_in(engine)
    summary = f"{model.description}; context {model.ready.max_model_len} tokens"
    return RunningEngine(engine, model.codec, summary, None, adapters=model.adapters)


def _in_thread_that_ends(threads: int, work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread of its own: the buffers that MKL keeps for a thread, 9 MB, are freed when it ends.

    ``threads``: for torch's operations; each thread has its own number.
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            torch.set_num_threads(threads)
            done.set_result(context.run(work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=f"{threading.current_thread().name}: weights", daemon=True).start()
    return done.result()


def _start(
    load: ModelLoad,
    lease: Lease[PreparedModel],
    loaded: LoadedModel,
    codec: TextCodec,
    on_death: OnDeath | None,
) -> RunningEngine:
    resolved, settings = load.resolved, load.resolved.settings
    prepared, host = lease.value, read_host()
    vocab_size = min(loaded.vocab_size, codec.vocab_size)
    samplers = SamplerFactory(codec, vocab_size, loaded.rules)
    choice = choose_batcher(load, prepared, loaded, samplers, codec)
    codec.limit_prompts(choice.context)
    info = _info(codec, vocab_size, choice.context, settings.max_num_seqs, loaded.default_sampling)
    engine = EngineCore(
        choice.batcher,
        codec,
        info,
        loaded.eos_token_ids,
        queue_limits=_queue_limits(settings),
        stream_interval=settings.stream_interval,
        # Our kernels have threads of their own. OpenMP's threads spin after each operation and would slow them.
        threads=1 if prepared.has_threads else load.threads,
        fair_lock=prepared.fair_lock,
        rebuild=partial(_rebuild, choice.make, prepared),
        on_death=on_death,
        name=resolved.source.name,
    )
    if prepared.ranks is not None:
        prepared.ranks.leader.watch_loss(engine.fail)
    origin = resolved.origins["threads"] if settings.threads else host.threads_origin
    how = f"{choice.description}; context {choice.context} tokens; {load.threads} threads ({origin})"
    summary = f"{loaded.description}; {how}"
    return RunningEngine(engine, codec, summary, lease)


def _info(
    codec: TextCodec, vocab_size: int, context: int, max_num_seqs: int, default_sampling: Mapping[str, Any]
) -> ModelInfo:
    return ModelInfo(
        vocab_size=min(vocab_size, codec.vocab_size),
        max_model_len=context,
        max_num_seqs=max_num_seqs,
        has_chat_template=codec.has_chat_template,
        default_sampling=default_sampling,
        tool_parser=codec.chat_format.tools,
        reasons=codec.chat_format.reasons,
        template_arguments=codec.chat_format.arguments,
    )


def _queue_limits(settings: EngineSettings) -> QueueLimits:
    return QueueLimits(
        settings.max_queued_requests,
        settings.max_queued_tokens,
        settings.queue_timeout,
        settings.request_timeout,
        settings.step_timeout,
        settings.chunked_prefill_size,
    )


def _rebuild(make: Callable[[], Batcher], prepared: PreparedModel) -> Batcher:
    """Makes a new batcher over the weights in memory. Raises the device's own error if a device is lost."""
    prepared.check_devices()
    return make()
