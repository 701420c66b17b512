"""Defines rank 0's caches and forward; their operations run on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.forward.interface import Forward, LoadedForward, Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader, Operation, batch_numbers, batch_of


class RankedCache(PagedCache):
    """Rank 0's part of a cache.

    Every rank stores its part under the same name; the parts exist until rank 0 drops its part.
    """

    def __init__(
        self, leader: Leader, layout: CacheLayout, page_size: int, pages: Sequence[int], state_slots: int
    ) -> None:
        super().__init__(layout, page_size, pages, state_slots)
        self.name = leader.name()
        leader.note(Operation.CACHE, self.name, page_size, state_slots, *pages)
        weakref.finalize(self, leader.note, Operation.DROP, self.name).atexit = False


class RankedForward(LoadedForward):
    """Runs the forwards of all ranks at the same time; ``own`` is rank 0's forward."""

    def __init__(self, own: ModelForward, leader: Leader) -> None:
        self.own = own
        self._leader = leader

    @property
    def packs(self) -> bool:
        return self.own.packs

    @property
    def attention_name(self) -> str:
        return self.own.attention_name

    def describe(self) -> str:
        return f"{self._leader.size} ranks, {self.own.describe()}"

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        """Runs the forward on all ranks.

        If all ranks raise errors at the same place, they stay usable, and rank 0's error is raised.
        """
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
    """Holds this rank's part of each cache of rank 0, by the cache's name, and runs operations on these parts."""

    def __init__(
        self,
        layout: CacheLayout,
        forward: Forward,
        all_raised: Callable[[], bool],
    ) -> None:
        self._layout = layout
        self._forward = forward
        self._all_raised = all_raised
        self._caches: dict[int, PagedCache] = {}

    def run(self, operation: Operation, name: int, *numbers: int) -> None:
        """Runs an operation of rank 0.

        Raises a forward's error, unless all ranks have raised errors at the same place.
        """
        if operation is Operation.CACHE:
            page_size, state_slots, *pages = numbers
            self._caches[name] = PagedCache(self._layout, page_size, pages, state_slots)
        elif operation is Operation.DROP:
            del self._caches[name]
        elif operation is Operation.FORWARD:
            try:
                self._forward(batch_of(numbers), self._caches[name])
            except Exception:
                if not self._all_raised():
                    raise
