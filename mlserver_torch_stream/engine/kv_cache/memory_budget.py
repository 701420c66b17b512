"""Computes the size of an engine's KV cache, and the part of it for prefixes of ended sequences.

Knows nothing of models: its callers say what a token takes on each device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec, in_all
from mlserver_torch_stream.engine.kv_cache.page_counts import CacheSize, size_cache
from mlserver_torch_stream.engine.loading.host_limits import Host
from mlserver_torch_stream.engine.process_resources import ProcessResources
from mlserver_torch_stream.errors import LoadFailed

# Of a GPU's free memory after loading; the rest is for activations, those that CUDA graphs keep, and the allocator's
# fragments. All graphs of a stage share the memory of the largest step, which has as many rows as a prompt's chunk at
# most, unless keys are gathered: a capture for which the rest is not enough is given up.
GPU_CACHE_SHARE = 0.8
# The most of the host's memory for prefixes of ended sequences: pages that were written to stay resident.
HOST_PREFIX_BYTES = 256 * 2**20
HOST = torch.device("cpu")


def cache_budget(
    specs: Mapping[torch.device, CacheSpec],
    asked: int | None,
    resources: ProcessResources,
    owner: object,
    host: Host,
    *,
    sequences: int,
    tokens: int,
    step: int,
    engines: int = 1,
    most: int = sys.maxsize,
) -> CacheSize:
    """Returns the pages and slots of a cache with these ``specs``: ``asked`` bytes on all devices, or what is free.

    A GPU's free memory excludes that of other engines already. ``engines`` share the host's memory equally. ``most`` is
    the free memory of the fullest device of all ranks. ``sequences``, ``tokens`` and ``step`` are those of
    ``size_cache``.
    """
    if asked is None:
        rooms = [
            (
                spec,
                resources.promise(owner, None, min(host.available_bytes, most), engines)
                if device == HOST
                else int(min(torch.cuda.mem_get_info(device)[0], most) * GPU_CACHE_SHARE) - spare_bytes(device, spec),
            )
            for device, spec in specs.items()
        ]
    else:
        rooms = [(in_all(specs.values()), asked - sum(spare_bytes(*each) for each in specs.items()))]
    size = size_cache(rooms, sequences=sequences, tokens=tokens, step=step)
    if HOST in specs:
        resources.promise(owner, size.bytes_of(specs[HOST]), host.available_bytes)
    return size


def spare_bytes(device: torch.device, spec: CacheSpec) -> int:
    """Returns the bytes of the pages that belong to no sequence. On a host they are never written, so they take no
    memory."""
    return 0 if device.type == "cpu" else spec.bytes_of([1] * len(spec.groups), 0)


def free_bytes(devices: Iterable[torch.device], host: Host) -> dict[torch.device, int]:
    """Returns the free bytes of each device now."""
    return {
        device: torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host.available_bytes
        for device in devices
    }


def prefix_bytes(budget: int, asked: int | None, on_host: bool) -> int:
    """Returns how many of a KV cache's bytes pages of ended sequences may keep, until other sequences need them.

    The memory of a GPU's cache is taken anyway. On a host it is not, before somebody writes to it. Raises LoadFailed.
    """
    if asked is None:
        return min(budget // 8, HOST_PREFIX_BYTES) if on_host else budget
    if asked > budget:
        raise LoadFailed(f"parameters.extra.prefix_cache_memory: {asked} bytes are more than the KV cache's {budget}")
    return asked
