"""Defines rank 0's caches and forward, whose operations all ranks run.

Knows nothing of batchers, to which they are a layout and a forward like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader


class MirroredLayout(CacheLayout):
    """Makes caches that exist on each rank under the same name."""

    def __init__(self, model: PreTrainedModel, leader: Leader) -> None:
        super().__init__(model.config)
        self._leader = leader

    def cache(self, rows: int = 1, capacity: int = 1) -> RowCache:
        return MirroredCache(self, self._leader, rows, capacity)


class MirroredCache(RowCache):
    """Holds rank 0's part of a cache, and records each change but a forward's for the other ranks."""

    def __init__(self, layout: CacheLayout, leader: Leader, rows: int, capacity: int) -> None:
        super().__init__(layout, rows, capacity)
        self.name = leader.name()
        self._leader = leader
        leader.note("cache", self.name, rows, capacity)
        weakref.finalize(self, leader.note, "drop", self.name).atexit = False

    def begin_row(self) -> None:
        with self._leader.mirrored("begin_row", self.name):
            super().begin_row()

    def resize(self, rows: int, capacity: int) -> None:
        with self._leader.mirrored("resize", self.name, rows, capacity):
            super().resize(rows, capacity)

    def join(self, source: RowCache, copies: int = 1) -> None:
        assert isinstance(source, MirroredCache)
        with self._leader.mirrored("join", self.name, source.name, copies):
            super().join(source, copies)

    def leave(self, leaving: set[int]) -> list[int]:
        with self._leader.mirrored("leave", self.name, sorted(leaving)):
            return super().leave(leaving)

    def clear_row(self, row: int) -> None:
        with self._leader.mirrored("clear_row", self.name, row):
            super().clear_row(row)

    def extract(self, row: int, spare: int = 1) -> RowCache:
        twin = super().extract(row, spare)
        assert isinstance(twin, MirroredCache)
        self._leader.note("extract", self.name, twin.name, row, spare)
        return twin

    def head(self, length: int, capacity: int) -> RowCache:
        twin = super().head(length, capacity)
        assert isinstance(twin, MirroredCache)
        self._leader.note("head", self.name, twin.name, length, capacity)
        return twin


class MirroredForward:
    """The ``Forward`` of transformers, on all ranks at once."""

    def __init__(self, model: PreTrainedModel, leader: Leader) -> None:
        self._forward = ModelForward(model)
        self._leader = leader

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor:
        assert isinstance(cache, MirroredCache)
        with self._leader.sending("forward", cache.name, [list(row) for row in tokens]):
            return self._forward(tokens, cache)
