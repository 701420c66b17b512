"""Defines rank 0's caches and forward, whose operations all ranks run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader
from mlserver_torch_stream.engine.tensor_parallel.operations import Operation, batch_numbers, batch_of
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


class FollowerCaches:
    """Holds this rank's part of each of rank 0's caches, by the cache's name, and runs operations on them.

    ``capture`` is ``capture_together`` for a cache, the most sequences and the longest sequence.
    """

    def __init__(
        self,
        layout: CacheLayout,
        forward: Forward,
        all_raised: Callable[[], bool],
        capture: Callable[[PagedCache, int, int], Forward | None],
    ) -> None:
        self._layout = layout
        self._forward = forward
        self._all_raised = all_raised
        self._capture = capture
        self._caches: dict[int, PagedCache] = {}
        self._captured: dict[int, Forward] = {}  # by the name of their cache

    def run(self, operation: Operation, name: int, *numbers: int) -> None:
        """Runs an operation of rank 0. Raises a forward's error unless all ranks have it."""
        if operation is Operation.CACHE:
            page_size, state_slots, *pages = numbers
            self._caches[name] = PagedCache(self._layout, page_size, pages, state_slots)
        elif operation is Operation.DROP:
            del self._caches[name]
            self._captured.pop(name, None)
        elif operation is Operation.CAPTURE:
            if (captured := self._capture(self._caches[name], *numbers)) is not None:
                self._captured[name] = captured
        elif operation is Operation.FORWARD:
            try:
                self._captured.get(name, self._forward)(batch_of(numbers), self._caches[name])
            except Exception:
                if not self._all_raised():
                    raise
