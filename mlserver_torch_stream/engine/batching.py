"""Chooses the batcher of a loaded model, with the size of its KV cache and the bounds of its scheduler."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.cache.budget import HOST, cache_budget, free_bytes, prefix_bytes
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.page_counts import CacheSize, pages_on_host
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import CacheSpec
from mlserver_torch_stream.engine.checks.forward_choice import ForwardChoice
from mlserver_torch_stream.engine.config_fields import steady_positions
from mlserver_torch_stream.engine.fault_injection import VARIABLE, InjectedFault, read_faults
from mlserver_torch_stream.engine.forward.interface import MODELS_OWN, LoadedForward
from mlserver_torch_stream.engine.loading.loader import LoadedModel
from mlserver_torch_stream.engine.loading.placement import describe_placement, no_room
from mlserver_torch_stream.engine.machine import Host, read_host
from mlserver_torch_stream.engine.model import ModelLoad, PreparedModel
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.queue import SchedulerLimits, longest_sequence
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher, InlineForwards
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.engine.step.serial import SerialBatcher
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)

# For models that compute each prompt in its own forward: a forward of few tokens takes about as long as a forward of 64
# (benchmarks/LOG.md).
_ROWS_FLOOR = 64
# On a CPU a packed step of 128 prompt tokens takes a quarter of the time of 512, and hardly more for each token. So in
# a step with decoding sequences, which wait for its end, prompts get a quarter of 512 tokens.
_BESIDE = 4
_SPECULATIVE = "parameters.extra.speculative"


@dataclass(frozen=True, slots=True)
class BatcherChoice:
    """A model's batcher: ``batcher`` is the first batcher, and ``make`` creates a replacement if a batcher dies.

    ``description`` is for the load summary.
    """

    make: Callable[[], Batcher]
    batcher: Batcher
    context: int  # tokens that a sequence may hold
    description: str
    attention: str  # in a word, for metadata and metrics


def choose_batcher(
    load: ModelLoad,
    prepared: PreparedModel,
    loaded: LoadedModel,
    samplers: SamplerFactory,
    owner: object,
) -> BatcherChoice:
    """Chooses the batcher of a loaded model. ``owner`` is passed to ``cache_budget``.

    Raises LoadFailed if the settings exclude every batcher, or if there is too little memory.
    """
    resolved = load.resolved
    problem = _why_serial(resolved, prepared, loaded)
    if problem is not None:
        return _batch_serially(resolved, prepared, loaded, samplers, problem)
    settings, findings, ranks, host = resolved.settings, prepared.findings, prepared.ranks, read_host()
    spec, choice = findings.spec, prepared.choice
    assert spec is not None and choice is not None  # as ``findings.problem`` is None
    size, limits, context = _sizes(load, prepared, spec, loaded.max_model_len, owner, host)
    slots = limits.max_num_seqs if spec.state_bytes else 0
    layout = CacheLayout(loaded.model.config)
    _try_to_reserve(choice.forward, PagedCache(layout, spec.page_size, limits.pages, slots), host)
    faults = _faults()

    def make() -> ContinuousBatcher:
        cache = (PagedCache if ranks is None else ranks.cache)(layout, spec.page_size, limits.pages, slots)
        return ContinuousBatcher(
            choice.forward,
            cache,
            samplers,
            limits,
            spec,
            lookup=_prompt_lookup(settings, spec, limits),
            step_target=settings.step_target / 1000,
            pipeline=prepared.pipeline,
            flights=InlineForwards(overlap=prepared.overlaps) if prepared.pipeline is None else None,
            faults=faults,
            check_devices=prepared.check_devices,
        )

    if len(prepared.placement) > 1:
        spread = describe_placement(prepared.placement, findings.specs, size)
        logger.info("Placement of %s: %s", resolved.source.name, spread)
    origin = resolved.origins["kv_cache_memory"] if settings.kv_cache_memory else None
    batcher = make()
    description = (
        f"{_describe_forward(settings, prepared, choice)}, "
        f"up to {limits.max_num_seqs} sequences at a time, KV cache {format_bytes(limits.cache_bytes)} "
        f"({origin or f'a share of what is free: {host.memory_origin}'}) in pages of {spec.page_size} tokens"
    )
    return BatcherChoice(make, batcher, context, description, choice.forward.attention_name)


def _sizes(
    load: ModelLoad, prepared: PreparedModel, spec: CacheSpec, max_model_len: int, owner: object, host: Host
) -> tuple[CacheSize, SchedulerLimits, int]:
    """Returns the cache's size, the scheduler's bounds and the longest sequence in tokens.

    Raises LoadFailed if the cache has no room for a sequence.
    """
    settings, findings, ranks = load.resolved.settings, prepared.findings, prepared.ranks
    chunk = settings.chunked_prefill_size if findings.chunked else None
    size = cache_budget(
        *(findings.specs, settings.kv_cache_memory, load.resources, owner, host),
        sequences=settings.max_num_seqs,
        tokens=max_model_len,
        step=max_model_len if chunk is None else chunk,
        engines=settings.replicas,
        most=sys.maxsize if ranks is None else ranks.shard.room,
    )
    limits = _limits(settings, prepared, spec, size, chunk)
    context = longest_sequence(spec, limits, max_model_len)
    if context < 2:
        key = "kv_cache_memory" if settings.kv_cache_memory or settings.device_map is None else "device_map"
        why = no_room(prepared.placement, findings.specs, settings.kv_cache_memory, free_bytes(findings.specs, host))
        raise LoadFailed(f"parameters.extra.{key}: {why}")
    return size, limits, context


def _why_serial(resolved: ResolvedSettings, prepared: PreparedModel, loaded: LoadedModel) -> str | None:
    """Returns why this model must be served one request at a time; None if it is batched.

    Raises LoadFailed if the settings require that it is batched.
    """
    problem, steady = prepared.findings.problem, steady_positions(loaded.model)
    if problem is None and steady is not None and loaded.max_model_len > steady:
        problem = f"its positions are rescaled beyond {steady} tokens"
    if problem is not None and (resolved.settings.engine == "batched" or prepared.ranks is not None):
        raise LoadFailed(f"this model cannot be batched: {problem}")
    if problem is not None and resolved.settings.speculative is not None:
        raise LoadFailed(f"{_SPECULATIVE}: this model is served one request at a time ({problem})")
    return problem


def _batch_serially(
    resolved: ResolvedSettings, prepared: PreparedModel, loaded: LoadedModel, samplers: SamplerFactory, problem: str
) -> BatcherChoice:
    make = partial(
        SerialBatcher,
        loaded.model,
        samplers,
        max_num_seqs=resolved.settings.max_num_seqs,
        check_devices=prepared.check_devices,
        pipeline=prepared.pipeline,
    )
    return BatcherChoice(make, make(), loaded.max_model_len, f"one request at a time ({problem})", MODELS_OWN)


def _limits(
    settings: EngineSettings, prepared: PreparedModel, spec: CacheSpec, size: CacheSize, chunk: int | None
) -> SchedulerLimits:
    """Returns the scheduler's bounds.

    ``chunk`` is the maximum number of prompt tokens in a step; None means whole prompts.
    """
    findings, budget, on_host_alone = prepared.findings, size.bytes_of(spec), set(prepared.findings.specs) == {HOST}
    packs = prepared.choice is not None and prepared.choice.forward.packs
    # The time that an operator chose for a step bounds its prompts alone.
    beside = chunk if "step_target" not in settings.model_fields_set and packs and on_host_alone else None
    # A cached prefix is of no use to a model that computes prompts whole or keeps states.
    keeps_prefixes = findings.chunked and not spec.state_bytes
    return SchedulerLimits(
        size.state_slots if spec.state_bytes else settings.max_num_seqs,
        chunk,
        pages_on_host(spec, budget) if on_host_alone else size.pages,
        budget,
        prefix_bytes(budget, settings.prefix_cache_memory, HOST in findings.specs) if keeps_prefixes else 0,
        stages=1 if prepared.pipeline is None else prepared.pipeline.depth,
        whole_prompts=not findings.chunked,
        prefill_floor=1 if packs else _ROWS_FLOOR,
        beside_budget=None if beside is None else max(1, beside // _BESIDE),
    )


def _try_to_reserve(forward: LoadedForward, cache: PagedCache, host: Host) -> None:
    """Allocates ``cache`` once to find out whether the system has the memory.

    Raises LoadFailed if the allocation fails.
    """
    try:
        forward.reserve(cache)
    except MemoryError as error:
        free = format_bytes(host.available_bytes)
        raise LoadFailed(f"parameters.extra.kv_cache_memory: {error}; {free} are free") from error


def _describe_forward(settings: EngineSettings, prepared: PreparedModel, choice: ForwardChoice) -> str:
    parts = [choice.forward.describe()]
    if settings.weights in ROUNDED:
        parts.append(f"{settings.weights} weights")
    if choice.no_kernels is not None and prepared.device.type == "cpu":
        parts.insert(0, f"transformers' forward ({choice.no_kernels})")
    if prepared.pipeline is not None:
        parts.append(f"{prepared.pipeline.depth} devices with a batch each")
    if choice.packed:
        parts.append(f"{choice.packed} linear layers laid out for this CPU")
    return ", ".join(parts)


def _prompt_lookup(settings: EngineSettings, spec: CacheSpec, limits: SchedulerLimits) -> PromptLookup | None:
    if settings.speculative is None:
        return None
    if spec.state_bytes:
        raise LoadFailed(f"{_SPECULATIVE}: this model keeps states, from which rejected drafts cannot be removed")
    if limits.whole_prompts:
        raise LoadFailed(f"{_SPECULATIVE}: this model cannot verify drafts, because it computes prompts whole")
    return PromptLookup(settings.speculative.prompt_lookup)


def _faults() -> tuple[InjectedFault, ...]:
    faults = read_faults(os.environ)
    if faults:
        logger.warning("%s is set: this engine injects faults", VARIABLE)
    return faults
