"""How many bytes of KV cache an engine gets, and which part of them kept prompts may take.

Knows nothing of models: it is told which part of a row's cache each device holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch

from mlserver_torch_stream.engine.devices import spread_budget
from mlserver_torch_stream.engine.loading.host_limits import Host
from mlserver_torch_stream.engine.process_resources import ProcessResources
from mlserver_torch_stream.errors import LoadFailed

# Of a GPU's free memory after loading; the rest is for activations and the allocator's fragments.
GPU_CACHE_SHARE = 0.8
# Of the host's memory, for kept prompts: what is used of it stays used.
HOST_PREFIX_BYTES = 256 * 2**20
HOST = torch.device("cpu")


def cache_budget(
    parts: Mapping[torch.device, float],
    asked: int | None,
    resources: ProcessResources,
    owner: object,
    host: Host,
    *,
    engines: int = 1,
    most: int = sys.maxsize,
) -> int:
    """Bytes in all, of which the devices hold these parts.

    A GPU's own free memory already lacks what other engines on it have taken. ``engines``: so many share the host's
    memory alike; ``most``: bytes that are free where there are the fewest, if this device has twins elsewhere.
    """
    if asked is None:
        room = {
            device: resources.promise(owner, None, min(host.available_bytes, most), engines)
            if device == HOST
            else int(min(torch.cuda.mem_get_info(device)[0], most) * GPU_CACHE_SHARE)
            for device in parts
        }
        asked = spread_budget(room, parts)
    if HOST in parts:
        resources.promise(owner, int(asked * parts[HOST]), host.available_bytes)
    return asked


def free_bytes(devices: Iterable[torch.device], host: Host) -> dict[torch.device, int]:
    """Of each device, now."""
    return {
        device: torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host.available_bytes
        for device in devices
    }


def prefix_bytes(budget: int, asked: int | None, on_host: bool) -> int:
    """The part of the KV cache's memory that kept prompts may take."""
    if asked is None:
        share = budget // 8
        return min(share, HOST_PREFIX_BYTES) if on_host else share
    if asked >= budget:
        raise LoadFailed(
            f"parameters.extra.prefix_cache_memory: {asked} bytes leave nothing of the KV cache's {budget} for rows"
        )
    return asked
