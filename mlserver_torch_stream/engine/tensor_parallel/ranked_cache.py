"""Defines rank 0's caches and forward, whose operations all ranks run.

Knows nothing of batchers, to which they are a cache and a forward like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader
from mlserver_torch_stream.engine.tensor_parallel.operations import Operation, batch_numbers


class RankedCache(PagedCache):
    """Rank 0's part of a cache that each rank has under the same name, until rank 0 drops its part."""

    def __init__(
        self, leader: Leader, layout: CacheLayout, page_size: int, pages: Sequence[int], state_slots: int
    ) -> None:
        super().__init__(layout, page_size, pages, state_slots)
        self.name = leader.name()
        leader.note(Operation.CACHE, self.name, page_size, state_slots, *pages)
        weakref.finalize(self, leader.note, Operation.DROP, self.name).atexit = False


class RankedForward:
    """Runs ``forward`` on all ranks at once."""

    def __init__(self, forward: Forward, leader: Leader) -> None:
        self._forward = forward
        self._leader = leader

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """If all ranks raise at the same place, the ranks go on, and this raises rank 0's error."""
        assert isinstance(cache, RankedCache)
        failure: Exception
        with self._leader.sending(Operation.FORWARD, cache.name, *batch_numbers(batch)):
            try:
                return self._forward(batch, cache)
            except Exception as error:
                if not self._leader.all_raised():
                    raise
                failure = error
        raise failure
