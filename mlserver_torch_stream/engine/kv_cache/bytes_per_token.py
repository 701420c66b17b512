"""Computes the bytes of tokens and states in a cache, on each device that has layers.

Knows nothing of budgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import add

import torch

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache


def specs_by_device(cache: PagedCache) -> dict[torch.device, CacheSpec]:
    """Reads the specs off a cache that a forward has written to; each counts the layers on its device."""
    held = {index: pages.keys.device for index, pages in cache.layers.items() if pages.keys is not None}
    states = {} if cache.states is None else cache.states.bytes_by_device()
    return {
        device: CacheSpec(
            cache.page_size,
            tuple(
                replace(
                    group,
                    token_bytes=sum(
                        cache.layers[index].token_bytes for index in group.layers if held.get(index) == device
                    ),
                )
                for group in cache.groups
            ),
            states.get(device, 0),
        )
        for device in dict.fromkeys([*held.values(), *states])
    }


def in_all(specs: Iterable[CacheSpec]) -> CacheSpec:
    """Returns the spec of all devices together. There must be one."""
    return reduce(add, specs)
