"""Computes the size of an engine's KV cache, and how many of its bytes may keep the pages of ended sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch

from mlserver_torch_stream.engine.cache.page_counts import CacheSize, size_cache
from mlserver_torch_stream.engine.cache.pages import CacheSpec, in_all
from mlserver_torch_stream.engine.devices import free_memory
from mlserver_torch_stream.engine.machine import Host
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed

# Share of a GPU's free memory after loading. The rest is for activations and for the fragments of torch's allocator.
GPU_CACHE_SHARE = 0.8
# The maximum bytes of a host's memory for pages of ended sequences: a page that was written once stays resident.
HOST_PREFIX_BYTES = 256 * 2**20
HOST = torch.device("cpu")


def cache_budget(
    specs: Mapping[torch.device, CacheSpec],
    setting: int | None,
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
    """Returns the numbers of pages and slots of a cache with ``setting`` bytes; None means a share of the free memory.

    ``specs`` describe the cache on each device. ``engines`` engines share the host's memory equally, and ``resources``
    reserves this engine's part for ``owner``. On a GPU, memory that other engines use does not count as free. ``most``
    is the free memory of the fullest device of all ranks. ``sequences``, ``tokens`` and ``step`` are passed to
    ``size_cache``.
    """
    if setting is None:
        rooms = [
            (
                spec,
                resources.promise(owner, None, min(host.available_bytes, most), engines)
                if device == HOST
                else int(min(free_memory(device), most) * GPU_CACHE_SHARE),
            )
            for device, spec in specs.items()
        ]
    else:
        rooms = [(in_all(specs.values()), setting)]
    size = size_cache(rooms, sequences=sequences, tokens=tokens, step=step)
    if HOST in specs:
        resources.promise(owner, size.bytes_of(specs[HOST]), host.available_bytes)
    return size


def free_bytes(devices: Iterable[torch.device], host: Host) -> dict[torch.device, int]:
    """Returns the free bytes of each device now."""
    return {device: free_memory(device) if device.type == "cuda" else host.available_bytes for device in devices}


def prefix_bytes(budget: int, setting: int | None, on_host: bool) -> int:
    """Returns how many bytes of a KV cache may hold pages of ended sequences while no other sequence needs the bytes.

    A GPU's cache is allocated as a whole. On a host, a page takes memory once it is first written, or, with our
    kernels, once any page in the same 2 MiB is written. Raises LoadFailed if ``setting`` exceeds ``budget``.
    """
    if setting is None:
        return min(budget // 8, HOST_PREFIX_BYTES) if on_host else budget
    if setting > budget:
        raise LoadFailed(
            f"parameters.extra.prefix_cache_memory: {setting} bytes are more than the KV cache's {budget} bytes"
        )
    return setting
