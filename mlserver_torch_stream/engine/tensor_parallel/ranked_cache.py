"""Defines rank 0's caches and forward, whose operations all ranks run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.comparison import in_a_line
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader
from mlserver_torch_stream.engine.tensor_parallel.operations import Operation, batch_numbers
from mlserver_torch_stream.engine.tensor_parallel.rank_graphs import capture_together
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed


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
    """Runs the forwards of all ranks at once; ``own`` is that of rank 0."""

    def __init__(self, own: ModelForward | GraphForward, leader: Leader, group: RankGroup) -> None:
        self.own = own
        self._leader = leader
        self._group = group

    def capture(
        self, cache: PagedCache, max_sequences: int, longest: int, capture_on: Callable[[str], GraphCapture | None]
    ) -> GraphForward | None:
        """Captures decode steps on all ranks, or on none. Returns rank 0's; the arguments are those of ``take_graphs``.

        Raises LoadFailed if the ranks are lost.
        """
        assert isinstance(cache, RankedCache) and isinstance(self.own, ModelForward)
        try:
            with self._leader.sending(Operation.CAPTURE, cache.name, max_sequences, longest):
                return capture_together(self.own, cache, max_sequences, longest, self._group, capture_on)
        except RuntimeError as error:
            why = f"{in_a_line(error)} ({self._leader.lost})"
            raise LoadFailed(f"{KEY}: the ranks were lost while they captured their decode steps: {why}") from error

    def replaying(self, graphs: GraphForward) -> RankedForward:
        """Returns the forward over the cache of captured steps: each rank replays its own."""
        return RankedForward(graphs, self._leader, self._group)

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        """If all ranks raise at the same place, the ranks go on, and this raises rank 0's error."""
        assert isinstance(cache, RankedCache)
        failure: Exception
        with self._leader.sending(Operation.FORWARD, cache.name, *batch_numbers(batch)):
            try:
                return self.own(batch, cache)
            except Exception as error:
                if not self._leader.all_raised():
                    raise
                failure = error
        raise failure
