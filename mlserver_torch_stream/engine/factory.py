"""From settings to a running engine: load, check, choose the backend, size the cache, say what was done.

Knows nothing of MLServer. Blocks for as long as loading takes: call it in a thread.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from mlserver_torch_stream.engine.api import Engine
from mlserver_torch_stream.engine.batching.batcher import Batcher
from mlserver_torch_stream.engine.batching.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.batching.pipelined import PipelinedBatcher
from mlserver_torch_stream.engine.batching.serial import SerialBatcher
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.fault_injection import VARIABLE, FaultInjector, read_faults
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import shares as device_shares
from mlserver_torch_stream.engine.kv_cache.memory_budget import HOST, cache_budget, free_bytes, in_words, prefix_bytes
from mlserver_torch_stream.engine.loading.context_length import steady_positions
from mlserver_torch_stream.engine.loading.fingerprint import engine_key, weights_key
from mlserver_torch_stream.engine.loading.heap import trim_heap
from mlserver_torch_stream.engine.loading.host_limits import Host, read_host
from mlserver_torch_stream.engine.loading.loader import LoadedModel, complete, load_tokenizer, locate, set_threads
from mlserver_torch_stream.engine.loading.pinned import release_pinned
from mlserver_torch_stream.engine.loading.placement import describe_placement, no_room
from mlserver_torch_stream.engine.loading.shared_pool import Lease
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.prepared_model import PreparedModel, give_back_weights, prepare
from mlserver_torch_stream.engine.process_resources import PROCESS, ProcessResources
from mlserver_torch_stream.engine.replicas import Deaths, ReplicatedEngine, on_devices_of_their_own
from mlserver_torch_stream.engine.sampling.sampler_factory import SamplerFactory
from mlserver_torch_stream.engine.scheduling.queue_limits import QueueLimits
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import ModelInfo

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256

OnDeath = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine and what it stands on, or several behind one: then ``parts`` are all of them, ``weights`` one's."""

    engine: Engine
    codec: TextCodec
    summary: str
    weights: Lease[PreparedModel]
    parts: tuple[RunningEngine, ...] = ()

    def stop(self, shares: ProcessResources) -> None:
        """Blocks."""
        self.engine.shutdown()
        for part in self.parts or (self,):
            shares.release(part.codec)
            give_back_weights(part.weights)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """One user's share of a running engine, and one line that says what is loaded where and how much cache it has."""

    lease: Lease[RunningEngine]
    shares: ProcessResources

    @property
    def engine(self) -> Engine:
        return self.lease.value.engine

    @property
    def codec(self) -> TextCodec:
        return self.lease.value.codec

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def summary(self) -> str:
        return self.lease.value.summary

    def give_back(self) -> bool:
        """True if nobody else uses the engine, nor ever will: then it is to be shut down."""
        return self.lease.end()

    def shutdown(self) -> None:
        """Stops the engine and gives its memory back. Blocks."""
        self.lease.value.stop(self.shares)


def build_engine(
    resolved: ResolvedSettings, owner: str = "", on_death: OnDeath | None = None, shares: ProcessResources = PROCESS
) -> BuiltEngine:
    """Loads what the settings name and starts its engine. Raises LoadFailed with one line that says why.

    Weights that are loaded already are shared; for the same ``owner`` with the same settings its engine too.
    """
    threads = set_threads(resolved.settings, read_host())
    key = engine_key(resolved, owner, weights_key(resolved, threads))
    run = _run if resolved.settings.replicas == 1 else _run_replicas
    return BuiltEngine(shares.engines.lease(key, lambda: run(resolved, threads, on_death, shares)), shares)


def reclaim_memory(shares: ProcessResources = PROCESS) -> None:
    """Frees what is left of engines that were shut down: modules in cycles, and blocks that CUDA's allocators keep."""
    gc.collect()
    if torch.cuda.is_initialized():
        with shares.recorders.turn():
            torch.cuda.empty_cache()
            release_pinned()
    trim_heap()


def _run_replicas(
    resolved: ResolvedSettings, threads: int, on_death: OnDeath | None, shares: ProcessResources
) -> RunningEngine:
    deaths = Deaths(resolved.settings.replicas, on_death)
    parts: list[RunningEngine] = []
    try:
        for settings in on_devices_of_their_own(resolved.settings):
            parts.append(_run(replace(resolved, settings=settings), threads, deaths.died, shares))
    except BaseException:
        for part in parts:
            part.stop(shares)
        raise
    engines = [part.engine for part in parts]
    first = parts[0]
    summary = f"{len(parts)} replicas: {'; '.join(dict.fromkeys(part.summary for part in parts))}"
    return RunningEngine(ReplicatedEngine(engines), first.codec, summary, first.weights, tuple(parts))


def _run(resolved: ResolvedSettings, threads: int, on_death: OnDeath | None, shares: ProcessResources) -> RunningEngine:
    key = weights_key(resolved, threads)
    place = locate(resolved)
    codec = TextCodec(tokenizer := load_tokenizer(place, resolved))
    lease: Lease[PreparedModel] = shares.weights.lease(key, lambda: prepare(place, resolved, threads, shares))
    try:
        loaded = complete(lease.value.weights, tokenizer, resolved)
        return _start(resolved, lease, loaded, codec, threads, on_death, shares)
    except BaseException:
        shares.release(codec)
        give_back_weights(lease)
        raise


def _start(
    resolved: ResolvedSettings,
    lease: Lease[PreparedModel],
    loaded: LoadedModel,
    codec: TextCodec,
    threads: int,
    on_death: OnDeath | None,
    shares: ProcessResources,
) -> RunningEngine:
    settings, prepared, host = resolved.settings, lease.value, read_host()
    vocab_size = min(int(loaded.model.get_input_embeddings().weight.shape[0]), codec.vocab_size)
    samplers = SamplerFactory(codec, vocab_size, loaded.eos_token_ids, loaded.rules)
    new_backend, context, how = _choose_backend(resolved, prepared, loaded, samplers, codec, host, shares)
    info = ModelInfo(
        vocab_size=vocab_size,
        max_model_len=context,
        max_rows=settings.max_num_seqs,
        has_chat_template=codec.has_chat_template,
        default_sampling={"max_tokens": DEFAULT_MAX_TOKENS, **loaded.default_sampling},
    )
    engine = EngineCore(
        new_backend(),
        codec,
        info,
        loaded.eos_token_ids,
        bounds=QueueLimits(
            settings.max_queued_requests,
            settings.max_queued_tokens,
            settings.queue_timeout,
            settings.request_timeout,
            settings.step_timeout,
            settings.chunked_prefill_size,
        ),
        # Our kernels have threads of their own; OpenMP's spin after each operation and would be in their way.
        threads=1 if isinstance(prepared.forward, NativeForward) else threads,
        turns=prepared.turns,
        rebuild=partial(_rebuild, new_backend, prepared),
        on_death=on_death,
        name=resolved.source.name,
    )
    if prepared.ranks is not None:
        prepared.ranks.leader.tell_of_loss(engine.fail)
    origin = resolved.origins["threads"] if settings.threads else host.threads_origin
    summary = f"{loaded.description}; {how}; context {context} tokens; {threads} threads ({origin})"
    return RunningEngine(engine, codec, summary, lease)


def _choose_backend(
    resolved: ResolvedSettings,
    prepared: PreparedModel,
    loaded: LoadedModel,
    samplers: SamplerFactory,
    codec: TextCodec,
    host: Host,
    shares: ProcessResources,
) -> tuple[Callable[[], Batcher], int, str]:
    """What makes a backend over the weights, the context that it holds, and how it works, in words."""
    settings, findings = resolved.settings, prepared.findings
    problem, steady = findings.problem, steady_positions(loaded.model)
    if problem is None and steady is not None and loaded.max_model_len > steady:
        problem = f"its positions are scaled anew beyond {steady} tokens"
    if findings.cost is None or problem is not None:
        if settings.engine == "batched" or prepared.ranks is not None:
            raise LoadFailed(f"this model cannot be batched: {problem}")
        serial = partial(
            SerialBatcher,
            loaded.model,
            samplers,
            max_rows=settings.max_num_seqs,
            check_devices=prepared.check_devices,
            **({} if prepared.pipeline is None else {"passage": prepared.pipeline.run}),
        )
        return serial, loaded.max_model_len, f"one request at a time ({problem})"
    parts = device_shares(findings.costs, loaded.max_model_len)
    ranks = prepared.ranks
    budget = cache_budget(
        *(parts, settings.kv_cache_memory, shares, codec, host),
        engines=settings.replicas,
        most=sys.maxsize if ranks is None else ranks.shard.room,
    )
    batched = partial(
        ContinuousBatcher if prepared.pipeline is None else partial(PipelinedBatcher, pipeline=prepared.pipeline),
        loaded.model,
        samplers,
        cost=findings.cost,
        cache_bytes=budget,
        prefix_bytes=prefix_bytes(budget, settings.prefix_cache_memory, on_host=HOST in parts),
        max_rows=settings.max_num_seqs,
        prefill_tokens=settings.chunked_prefill_size if findings.chunked else None,
        forward=prepared.forward if ranks is None else ranks.forward,
        layout=None if ranks is None else ranks.layout,
        faults=_faults(),
        check_devices=prepared.check_devices,
    )
    backend = batched()
    context = backend.longest_row(loaded.max_model_len)
    if context < 2:
        key = "kv_cache_memory" if settings.kv_cache_memory or settings.device_map is None else "device_map"
        if settings.prefix_cache_memory and batched(prefix_bytes=0).longest_row(loaded.max_model_len) >= 2:
            key = "prefix_cache_memory"
        left, free = backend.stats().kv_cache_budget, free_bytes(findings.costs, host)
        raise LoadFailed(f"parameters.extra.{key}: {no_room(prepared.placement, findings.costs, left, free)}")
    if len(prepared.placement) > 1:
        spread = describe_placement(prepared.placement, findings.costs, parts, budget)
        logger.info("Placement of %s: %s", resolved.source.name, spread)
    origin = resolved.origins["kv_cache_memory"]
    how = (
        f"{_kernels(resolved, prepared)}up to {settings.max_num_seqs} rows at a time, "
        f"KV cache {in_words(budget)} "
        f"({origin if settings.kv_cache_memory else f'a share of what is free: {host.memory_origin}'})"
    )
    return batched, context, how


def _kernels(resolved: ResolvedSettings, prepared: PreparedModel) -> str:
    if prepared.ranks is not None:
        return str(prepared.ranks)
    if isinstance(prepared.forward, NativeForward):
        return "our own kernels, int8 weights, " if resolved.settings.weights == "int8" else "our own kernels, "
    ways = [f"transformers' forward ({prepared.no_kernels}), "] if prepared.no_kernels is not None else []
    if prepared.pipeline is not None:
        ways.append(f"{prepared.pipeline.depth} devices at work on a group of rows each, ")
    if isinstance(prepared.forward, GraphForward):
        ways.append(f"CUDA graphs of up to {prepared.forward.max_rows} rows, ")
    if prepared.packed:
        ways.append(f"{prepared.packed} linear layers laid out for this CPU, ")
    return "".join(ways)


def _rebuild(new_backend: Callable[[], Batcher], prepared: PreparedModel) -> Batcher:
    """A fresh backend over the weights in memory. Raises what a device raises that is lost."""
    prepared.check_devices()
    return new_backend()


def _faults() -> FaultInjector | None:
    faults = read_faults(os.environ)
    if faults is not None:
        logger.warning("%s is set: this engine fails on purpose", VARIABLE)
    return faults
