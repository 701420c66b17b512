"""Runs a model on this package's own engine: loads and checks the model, and starts an engine core over its batcher."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from mlserver_torch_stream.engine.batching import choose_batcher
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.fingerprint import length_setting, weights_key
from mlserver_torch_stream.engine.loading.loader import LoadedModel, complete
from mlserver_torch_stream.engine.loading.locate import download_weights, locate, locate_packed
from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.loading.tokenizer_files import load_tokenizer
from mlserver_torch_stream.engine.machine import read_host, trim_heap
from mlserver_torch_stream.engine.model import ModelLoad, PreparedModel, prepare
from mlserver_torch_stream.engine.replicas import Deaths, ReplicatedEngine, on_devices_of_their_own
from mlserver_torch_stream.engine.running_engine import (
    OnDeath,
    RunningEngine,
    give_back_weights,
    model_info,
    queue_limits,
)
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.shared_pool import Lease, ProcessResources
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.settings import ResolvedSettings

T = TypeVar("T")


def run_own(
    resolved: ResolvedSettings, threads: int, resources: ProcessResources, on_death: OnDeath | None
) -> RunningEngine:
    """Loads a model and starts its engine. Blocks until the engine runs.

    ``threads`` is the number of threads for torch and our kernels. Raises LoadFailed if the model cannot be loaded.
    """
    torch.set_num_threads(threads)
    load = ModelLoad(resolved, threads, resources)
    return (_run if resolved.settings.replicas == 1 else _run_replicas)(load, on_death)


@contextmanager
def torch_inference(threads: int) -> Iterator[None]:
    """Sets torch's number of threads for the calling thread, and switches gradients off."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        yield


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
    download_weights(resolved)  # here, because another model can load meanwhile
    files = locate_packed(resolved, resources.loading_alone) or locate(resolved, resources.loading_alone)
    key = weights, length_setting(resolved, files.location)
    # Most of a recorded load of weights passes without the interpreter's lock.
    reading = _in_thread_that_ends("text", load.threads, lambda: _read_text(files, resolved))
    if resolved.source.kind == "hub" or resolved.settings.tokenizer:
        reading.result()  # the tokenizer may be downloaded, and another model can load meanwhile

    def make() -> PreparedModel:
        with resources.loading_alone():
            return prepare(files, load, reading.result)

    lease: Lease[PreparedModel] = resources.weights.lease(
        key, lambda: _in_thread_that_ends("weights", load.threads, make).result()
    )
    try:
        tokenizer, codec = reading.result()
        try:
            return _start(load, lease, complete(lease.value.weights, tokenizer, resolved), codec, on_death)
        except BaseException:
            resources.release(codec)
            raise
    except BaseException:
        give_back_weights(lease)
        raise


def _read_text(files: ModelFiles, resolved: ResolvedSettings) -> tuple[Any, TextCodec]:
    """Reads the tokenizer and its vocabulary. Raises LoadFailed if it cannot be used."""
    parsers = resolved.settings.tool_parser, resolved.settings.reasoning_parser
    codec = TextCodec(tokenizer := load_tokenizer(files, resolved), *parsers)
    codec.prepare()
    trim_heap()  # reading leaves 50 MB of free blocks
    return tokenizer, codec


def _in_thread_that_ends(name: str, threads: int, work: Callable[[], T]) -> Future[T]:
    """Starts ``work`` in a new thread. The end of the thread frees the 9 MB of buffers that MKL keeps for each thread.

    ``threads`` is the number of threads for torch's operations, which torch stores per thread.
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            torch.set_num_threads(threads)
            done.set_result(context.run(work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=f"{threading.current_thread().name}: {name}", daemon=True).start()
    return done


def with_device_defaults(load: ModelLoad, devices: Iterable[torch.device]) -> ModelLoad:
    """Returns the load, with the defaults for GPUs if all ``devices`` of the KV cache are GPUs."""
    if {device.type for device in devices} != {"cuda"}:
        return load
    return replace(load, resolved=replace(load.resolved, settings=load.resolved.settings.on_gpus()))


def _start(
    load: ModelLoad,
    lease: Lease[PreparedModel],
    loaded: LoadedModel,
    codec: TextCodec,
    on_death: OnDeath | None,
) -> RunningEngine:
    prepared, host = lease.value, read_host()
    load = with_device_defaults(load, prepared.findings.specs)
    resolved, settings = load.resolved, load.resolved.settings
    vocab_size = min(loaded.vocab_size, codec.vocab_size)
    samplers = SamplerFactory(codec, vocab_size, loaded.rules)
    choice = choose_batcher(load, prepared, loaded, samplers, codec)
    codec.limit_prompts(choice.context)
    info = model_info(
        codec, vocab_size, choice.context, settings.max_num_seqs, loaded.default_sampling, choice.attention
    )
    engine = EngineCore(
        choice.batcher,
        codec,
        info,
        loaded.eos_token_ids,
        queue_limits=queue_limits(settings),
        event_interval=settings.event_interval,
        # Our kernels have threads of their own. OpenMP's threads spin after each operation and would slow them.
        context=partial(torch_inference, 1 if prepared.has_threads else load.threads),
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


def _rebuild(make: Callable[[], Batcher], prepared: PreparedModel, deaths: int) -> Batcher:
    """Makes a new batcher over the weights in memory. Raises the device's own error if a device is lost."""
    prepared.check_devices()
    return make()
