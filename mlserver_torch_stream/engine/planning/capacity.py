"""Computes how many streams a model can have on some devices, and how fast memory and arithmetic let it be.

Knows nothing of how a plan is printed. The memory is what the engine takes; the speeds are limits that no engine
reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlserver_torch_stream.engine.kv_cache.memory_budget import GPU_CACHE_SHARE
from mlserver_torch_stream.engine.kv_cache.page_counts import largest, size_cache
from mlserver_torch_stream.engine.loading.host_limits import KV_SHARE
from mlserver_torch_stream.engine.planning.device_catalogue import DeviceSpec
from mlserver_torch_stream.engine.planning.model_size import ModelSize
from mlserver_torch_stream.engine_settings import EngineSettings

_MOST_STREAMS = 4096
_CHUNK = EngineSettings.model_fields["chunked_prefill_size"].default  # new tokens of a prompt at a time


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """One model over ``ranks`` devices. Speeds are in tokens per second; None if that of the device is not known."""

    ranks: int
    weights: int  # bytes on each device
    cache: int  # bytes on each device
    streams: int
    alone: float  # one stream
    together: float  # all of them
    prompts: float | None  # prefill

    @property
    def fits(self) -> bool:
        return self.streams > 0


def plan_model(
    size: ModelSize, device: DeviceSpec, context: int, most_devices: int, *, on_host: bool
) -> list[CapacityPlan]:
    """Returns a plan for each number of ranks up to ``most_devices`` that can share the model.

    ``on_host``: the device is this machine's CPU. Several ranks would share its memory, so only one rank is planned.
    """
    share = KV_SHARE if on_host else GPU_CACHE_SHARE
    counts = [ranks for ranks in size.ranks if ranks <= (1 if on_host else most_devices)]
    return [make_plan(size, device, ranks, context, share) for ranks in counts]


def make_plan(size: ModelSize, device: DeviceSpec, ranks: int, context: int, cache_share: float) -> CapacityPlan:
    """``context``: tokens that each stream reaches; ``cache_share`` is of the memory that the weights leave."""
    weights = size.weight_bytes // ranks
    cache = max(0, int((device.memory - weights) * cache_share))
    streams = _streams(size, ranks, cache, context)
    return CapacityPlan(
        ranks=ranks,
        weights=weights,
        cache=cache,
        streams=streams,
        alone=_decode(size, device, ranks, context, 1),
        together=_decode(size, device, ranks, context, max(1, streams)),
        prompts=None if device.flops is None else ranks * device.flops / (2 * size.active),
    )


def _streams(size: ModelSize, ranks: int, cache: int, context: int) -> int:
    """Returns the most sequences of this length whose pages and states an engine has at a time."""

    def holds(count: int) -> bool:
        rooms = [(size.spec, cache * ranks)]
        pages = size_cache(rooms, sequences=count, tokens=context, step=min(_CHUNK, context))
        return pages.holds(size.spec, count, context)

    return largest(_MOST_STREAMS, holds)


def _decode(size: ModelSize, device: DeviceSpec, ranks: int, context: int, sequences: int) -> float:
    """Returns tokens per second: a step reads all weights and caches, and multiplies each token with the weights."""
    seconds = (size.read_per_step(sequences) + sequences * size.spec.live_bytes(context)) / (ranks * device.bandwidth)
    if device.flops is not None:
        seconds = max(seconds, sequences * 2 * size.active / (ranks * device.flops))
    return sequences / seconds
