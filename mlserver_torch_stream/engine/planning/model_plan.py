"""Plans one model for one kind of device: what each number of ranks gives, with the engine's own shares of memory.

Knows nothing of how a plan is shown.
"""

from __future__ import annotations

from mlserver_torch_stream.engine.kv_cache.memory_budget import GPU_CACHE_SHARE, HOST_PREFIX_BYTES
from mlserver_torch_stream.engine.loading.host_limits import KV_SHARE
from mlserver_torch_stream.engine.planning.capacity import CapacityPlan, make_plan
from mlserver_torch_stream.engine.planning.device_catalogue import DeviceSpec
from mlserver_torch_stream.engine.planning.model_size import ModelSize


def plan_model(
    size: ModelSize, device: DeviceSpec, context: int, most_devices: int, *, on_host: bool
) -> list[CapacityPlan]:
    """One plan for each number of ranks up to ``most_devices`` that can share the model.

    ``on_host``: the device is this machine's CPU. Its ranks would share one memory, so there is one of them.
    """
    share, most_kept = (KV_SHARE, HOST_PREFIX_BYTES) if on_host else (GPU_CACHE_SHARE, None)
    counts = [ranks for ranks in size.ranks if ranks <= (1 if on_host else most_devices)]
    return [make_plan(size, device, ranks, context, share, most_kept) for ranks in counts]
