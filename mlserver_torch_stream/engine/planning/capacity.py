"""How many streams a model gets on some devices, and how fast memory and arithmetic let it be.

Knows nothing of torch. The memory is what the engine really takes; the speeds are limits, which no engine reaches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlserver_torch_stream.engine.planning.device_catalogue import DeviceSpec
from mlserver_torch_stream.engine.scheduling.scheduler import Scheduler, SchedulerLimits

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.planning.model_size import ModelSize

_MOST_STREAMS = 4096
_KEPT = 1 / 8  # of the cache's memory, for kept prompts


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """One model over ``ranks`` devices; the speeds in tokens a second, None where the device's is not known."""

    ranks: int
    weights: int  # bytes on each device
    cache: int  # likewise
    streams: int
    alone: float  # one stream
    together: float  # all of them
    prompts: float | None  # prefill

    @property
    def fits(self) -> bool:
        return self.streams > 0


def make_plan(
    size: ModelSize, device: DeviceSpec, ranks: int, context: int, cache_share: float, most_kept: int | None = None
) -> CapacityPlan:
    """``context``: tokens that each stream comes to hold; ``cache_share``: of what the weights leave free.

    ``most_kept``: bytes that kept prompts may take at most.
    """
    weights = size.weight_bytes // ranks
    cache = max(0, int((device.memory - weights) * cache_share))
    kept = int(cache * _KEPT) if most_kept is None else min(int(cache * _KEPT), most_kept)
    streams = _streams(lambda rows, columns: size.cost.of(rows, columns) // ranks, cache - kept, context)
    return CapacityPlan(
        ranks=ranks,
        weights=weights,
        cache=cache,
        streams=streams,
        alone=_decode(size, device, ranks, context, 1),
        together=_decode(size, device, ranks, context, max(1, streams)),
        prompts=None if device.flops is None else ranks * device.flops / (2 * size.active),
    )


def _streams(cost: Callable[[int, int], int], budget: int, context: int) -> int:
    """The most rows of this length that the engine's own account lets in at a time."""
    scheduler = Scheduler(SchedulerLimits(_MOST_STREAMS, None, budget, cost))
    rows = range(1, _MOST_STREAMS + 1)
    return bisect_left(rows, True, key=lambda count: not scheduler.fits_alone(count, context, context))


def _decode(size: ModelSize, device: DeviceSpec, ranks: int, context: int, rows: int) -> float:
    """Tokens a second: a step reads the weights and each row's cache once, and multiplies each row with the weights."""
    seconds = (size.read_per_step(rows) + size.cost.of(rows, context)) / (ranks * device.bandwidth)
    if device.flops is not None:
        seconds = max(seconds, rows * 2 * size.active / (ranks * device.flops))
    return rows / seconds
