"""Holds the KV cache of a batch: rows join, advance together and leave. Each layer has a cache layer of its kind.

Knows nothing of requests, sampling or scheduling; a row is an index and a length in tokens.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from mlserver_torch_stream.engine.kv_cache import state_layers
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import window_capacity
from mlserver_torch_stream.engine.kv_cache.slab import Columns, SlabLayer


class UnsupportedCache(Exception):
    """A layer keeps a state that cannot be batched here; the serial batcher serves such models."""


class CacheLayout:
    """Knows the kind of each layer's cache, read from the config as transformers' own caches read it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._layers = DynamicCache(config=config).layers
        for layer in self._layers:
            known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
            if not known and isinstance(layer, CacheLayerMixin | LinearAttentionLayer):
                raise UnsupportedCache(f"cache layers of type {type(layer).__name__} cannot be batched")

    @property
    def has_attention(self) -> bool:
        return any(isinstance(layer, DynamicLayer) for layer in self._layers)

    @property
    def has_states(self) -> bool:
        return any(isinstance(layer, LinearAttentionLayer) for layer in self._layers)

    @property
    def windows(self) -> list[int | None]:
        """The window of each attention layer in columns; None: the layer sees all columns."""
        layers = (layer for layer in self._layers if isinstance(layer, DynamicLayer))
        return [int(layer.sliding_window) if layer.is_sliding else None for layer in layers]

    def build(self, columns: Columns, rows: int, capacity: int) -> Cache:
        return Cache(layers=[self._layer(layer, columns, rows, capacity) for layer in self._layers])

    @staticmethod
    def _layer(layer: object, columns: Columns, rows: int, capacity: int) -> object:
        if isinstance(layer, DynamicSlidingWindowLayer):
            window = int(layer.sliding_window)
            return SlabLayer(columns, rows, min(capacity, window_capacity(window)), window)
        if isinstance(layer, DynamicLayer):
            return SlabLayer(columns, rows, capacity)
        return copy.deepcopy(layer)

    def cache(self, rows: int = 1, capacity: int = 1) -> RowCache:
        """Returns an empty cache."""
        return RowCache(self, rows, capacity)


class RowCache:
    """``len(lengths)`` rows of at most ``rows``, aligned at their newest token, in slabs of ``capacity`` columns."""

    def __init__(self, layout: CacheLayout, rows: int = 1, capacity: int = 1) -> None:
        self.layout = layout
        self.allocated = (rows, capacity)
        self.columns = Columns()
        self.cache = layout.build(self.columns, rows, capacity)
        self.lengths: list[int] = []

    @property
    def slabs(self) -> list[SlabLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, SlabLayer)]

    def begin_row(self) -> None:
        """Adds the one row of an empty cache that a prefill fills."""
        assert not self.lengths
        self.lengths = [0]

    def mask(self, queries: int, device: torch.device) -> torch.Tensor | None:
        """Returns ``[rows, span + queries]``, 0 where a row is padded at its left; None if no row is."""
        span = self.columns.span
        if not self.layout.has_attention or all(length == span for length in self.lengths):
            return None
        starts = torch.tensor([[span - length] for length in self.lengths], device=device)
        return (torch.arange(span + queries, device=device) >= starts).long()

    def positions(self, queries: int, device: torch.device) -> torch.Tensor:
        """Returns ``[rows, queries]``: the position of each new token in its own sequence."""
        lengths = torch.tensor([[length] for length in self.lengths], device=device)
        return lengths + torch.arange(queries, device=device)

    def commit(self, queries: int) -> None:
        """Counts the columns that a forward of ``queries`` tokens per row has written."""
        self.columns.end += queries
        self.lengths = [length + queries for length in self.lengths]
        for slab in self.slabs:
            slab.commit()

    def rollback(self) -> None:
        """Forgets the columns of a forward that raised. States (``layout.has_states``) cannot be restored."""
        for slab in self.slabs:
            slab.commit()

    def resize(self, rows: int, capacity: int) -> None:
        self.allocated = (0, 0)  # unknown if the memory runs out midway
        for slab in self.slabs:
            columns = capacity if slab.window is None else min(capacity, window_capacity(slab.window))
            columns = max(columns, self.columns.end - slab.first_visible())
            if slab.is_initialized:
                slab.relocate(rows, columns, slab.first_visible())
            slab.rows, slab.capacity = rows, columns
        self.allocated = (rows, capacity)

    def join(self, source: RowCache, copies: int = 1) -> None:
        """Appends the single row of ``source`` ``copies`` times; the slabs must have room for the rows.

        If it raises, for lack of memory, the other rows are as before.
        """
        length = source.lengths[0]
        rows = range(len(self.lengths), len(self.lengths) + copies)
        begin, oldest = self.columns.begin, self.columns.end - length
        self.columns.begin = min(begin, oldest) if self.lengths else oldest
        pairs = list(zip(self.cache.layers, source.cache.layers, strict=True))
        try:
            joined = [
                state_layers.join(target, given, copies) if isinstance(target, LinearAttentionLayer) else target
                for target, given in pairs
            ]
            for target, given in pairs:
                if isinstance(target, SlabLayer) and given.is_initialized:
                    self._join_slab(target, given, length, rows)
        except BaseException:
            self.columns.begin = begin
            raise
        self.cache.layers[:] = joined
        self.lengths += [length] * copies

    def _join_slab(self, target: SlabLayer, given: SlabLayer, length: int, rows: range) -> None:
        if not target.is_initialized:
            target.base = target.first_visible()
            target.lazy_initialization(given.keys, given.values)
        target.make_room(target.first_visible(), self.columns.end)
        keys, values = given.read(0, length)
        for row in rows:
            target.write(row, keys, values)

    def leave(self, leaving: set[int]) -> list[int]:
        """Drops rows; the last ones fill the gaps. Returns the old index of each remaining row, in the new order."""
        order = list(range(len(self.lengths)))
        for row in sorted(leaving, reverse=True):
            order[row] = order[-1]
            order.pop()
        # States first: they need memory, and may raise before anything has changed.
        self.cache.layers[:] = [
            state_layers.pick(layer, order) if isinstance(layer, LinearAttentionLayer) else layer
            for layer in self.cache.layers
        ]
        for slab in self.slabs:
            for target, source in enumerate(order) if slab.is_initialized else ():
                if source != target:
                    slab.move_row(source, target)
        self.lengths = [self.lengths[source] for source in order]
        if self.lengths:
            self.columns.begin = self.columns.end - max(self.lengths)
        return order

    def clear_row(self, row: int) -> None:
        """Zeroes a failed row, so that its NaNs do not reach the masked columns of a later one."""
        for slab in self.slabs:
            if slab.is_initialized:
                slab.clear_row(row)

    def extract(self, row: int, spare: int = 1) -> RowCache:
        """Returns a copy of one row as a cache of its own, with room for ``spare`` more columns."""
        length = self.lengths[row]
        twin = self.layout.cache(rows=1, capacity=length + spare)
        layers = twin.cache.layers
        twin.columns.end = length
        for index, (target, given) in enumerate(zip(layers, self.cache.layers, strict=True)):
            if isinstance(target, SlabLayer) and given.is_initialized:
                target.base = target.first_visible()
                target.lazy_initialization(given.keys, given.values)
                target.write(0, *given.read(row, length))
            elif isinstance(target, LinearAttentionLayer):
                layers[index] = state_layers.pick(given, [row])
        twin.lengths = [length]
        return twin

    def is_whole(self, row: int) -> bool:
        """Whether this row has the keys and values of all its tokens, so that it can be cut to a prefix."""
        oldest = self.columns.end - self.lengths[row]
        return not self.layout.has_states and all(slab.first_visible() <= oldest for slab in self.slabs)

    def compact(self) -> RowCache:
        """Returns the single row without spare columns; itself if it has none."""
        length = self.lengths[0]
        return self if all(slab.capacity <= length for slab in self.slabs) else self.extract(0, spare=0)

    def head(self, length: int, capacity: int) -> RowCache:
        """Returns a copy of the first ``length`` tokens of the single row, with room for ``capacity`` tokens in all."""
        twin = self.layout.cache(rows=1, capacity=capacity)
        twin.columns.end = length
        for target, given in zip(twin.slabs, self.slabs, strict=True):
            if given.is_initialized:
                target.lazy_initialization(given.keys, given.values)
                start = self.columns.begin - given.base
                columns = slice(start, start + length)
                target.write(0, given.keys[0, :, columns], given.values[0, :, columns])
        twin.lengths = [length]
        return twin
