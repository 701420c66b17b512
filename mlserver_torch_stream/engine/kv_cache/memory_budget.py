"""Computes how many bytes of KV cache an engine gets, and the part of them for the prefix cache.

Knows nothing of models: its callers say which part of a cache each device holds.
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
# The most of the host's memory for the prefix cache, which never shrinks.
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
    """Returns the bytes of a cache of which the devices hold these ``parts``.

    A GPU's free memory excludes that of other engines already. ``engines`` share the host's memory equally. ``most`` is
    the free memory of the fullest device of all ranks.
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
    """Returns the free bytes of each device now."""
    return {
        device: torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host.available_bytes
        for device in devices
    }


def prefix_bytes(budget: int, asked: int | None, on_host: bool) -> int:
    """Returns the part of the KV cache's memory for the prefix cache. Raises LoadFailed."""
    if asked is None:
        share = budget // 8
        return min(share, HOST_PREFIX_BYTES) if on_host else share
    if asked >= budget:
        raise LoadFailed(
            f"parameters.extra.prefix_cache_memory: {asked} bytes leave nothing of the KV cache's {budget}"
        )
    return asked
