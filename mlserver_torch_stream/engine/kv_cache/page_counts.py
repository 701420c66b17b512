"""Chooses the size of a KV cache's pages, and how many each group of layers gets.

Knows nothing of tensors or sequences.
"""

from __future__ import annotations

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec

_HOST_PAGE = 32  # tokens
_CUDA_PAGE = 256  # tokens: torch's varlen attention takes multiples of that
_TYPICAL_LENGTH = 2048  # tokens of a sequence, for which a fixed split of the memory is right


def page_size(device_type: str) -> int:
    """Returns the tokens of a page on such a device."""
    return _CUDA_PAGE if device_type == "cuda" else _HOST_PAGE


def page_counts(
    spec: CacheSpec, cache_bytes: int, *, sequences: int, context: int, reserved: bool = False
) -> tuple[int, ...]:
    """Returns the number of pages of each group within ``cache_bytes``, states of so many ``sequences`` included.

    Where memory is taken when it is first written to, as on CPUs, each group may come to take all of it: the scheduler
    keeps account of their sum. Where it is ``reserved`` at once, the groups split it as a sequence of typical length
    does.
    """
    if not reserved:
        return tuple(cache_bytes // max(1, spec.page_bytes(group)) for group in range(len(spec.groups)))
    left = max(0, cache_bytes - sequences * spec.state_bytes)
    length = min(context, _TYPICAL_LENGTH)
    weights = [spec.most_pages(group, length, 1) * spec.page_bytes(group) for group in range(len(spec.groups))]
    total = max(1, sum(weights))
    return tuple(left * weight // total // max(1, spec.page_bytes(g)) for g, weight in enumerate(weights))
