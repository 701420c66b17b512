"""Holds one KV-cache layer in a preallocated slab, with rows that are aligned at their newest token.

Knows nothing of sequences; it holds keys and values of logical columns and returns views of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


@dataclass(slots=True)
class Columns:
    """The logical columns that all layers of one cache share: ``begin`` is the oldest live one, ``end`` the next free.

    Both only ever move; they are not positions in a tensor and may be negative (a long row joined a short batch).
    """

    begin: int = 0
    end: int = 0

    @property
    def span(self) -> int:
        return self.end - self.begin


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one attention layer, ``[rows, kv_heads, columns, head_dim]``, on the layer's own device.

    ``update`` writes into the slab and returns views, so nothing is concatenated; a layer with a ``window`` keeps and
    returns the window alone. Columns count after ``commit``, so a forward that raises changes nothing.
    """

    is_compileable = False

    def __init__(self, columns: Columns, rows: int, capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.columns = columns
        self.rows = rows
        self.capacity = capacity
        self.window = window
        self.is_sliding = window is not None
        self.base = columns.begin  # logical column of the slab's first one
        self.pending = 0  # columns written by a forward that is still under way

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._empty(key_states)
        self.values = self._empty(value_states)
        self.is_initialized = True

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: a masked column still takes part in 0 * value, and garbage may be NaN.
        shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def first_visible(self) -> int:
        """Returns the oldest logical column that the next token can attend to."""
        if self.window is None:
            return self.columns.begin
        return max(self.columns.begin, self.columns.end - self.window + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``[rows, kv_heads, queries, head_dim]`` and returns all columns that the newest token sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, queries = key_states.shape[0], key_states.shape[2]
        first, start = self.first_visible(), self.extend(queries)
        self.keys[:rows, :, start : start + queries] = key_states
        self.values[:rows, :, start : start + queries] = value_states
        view = (slice(0, rows), slice(None), slice(first - self.base, start + queries))
        return self.keys[view], self.values[view]

    def extend(self, queries: int) -> int:
        """Makes room for ``queries`` columns that are to be written. Returns the slab's index of the first one."""
        self.make_room(self.first_visible(), self.columns.end + queries)
        self.pending = queries
        return self.columns.end - self.base

    def make_room(self, first: int, last: int) -> None:
        """Lets the slab hold the logical columns ``first`` to ``last - 1``, and moves them if needed."""
        if first >= self.base and last - self.base <= self.capacity:
            return
        needed = last - first
        capacity = self.capacity if needed <= self.capacity else needed + needed // 4
        self.relocate(self.rows, capacity, first)

    def relocate(self, rows: int, capacity: int, base: int) -> None:
        """Moves the live part into a slab of ``rows`` x ``capacity`` that starts at logical column ``base``."""
        held = self.base + self.capacity  # a row that joins may need more
        kept = slice(max(base, self.base), min(self.columns.end + self.pending, held))
        keys = self._moved(self.keys, rows, capacity, base, kept)
        values = self._moved(self.values, rows, capacity, base, kept)
        # After both are made: either can fail for lack of memory.
        self.keys, self.values = keys, values
        self.rows, self.capacity, self.base = rows, capacity, base

    def _moved(self, old: torch.Tensor, rows: int, capacity: int, base: int, kept: slice) -> torch.Tensor:
        new = torch.zeros((rows, old.shape[1], capacity, old.shape[3]), dtype=old.dtype, device=old.device)
        shared = min(rows, old.shape[0])
        if kept.stop > kept.start:
            new[:shared, :, kept.start - base : kept.stop - base] = old[
                :shared, :, kept.start - self.base : kept.stop - self.base
            ]
        return new

    def commit(self) -> None:
        self.pending = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.first_visible()
        return self.columns.end + query_length - first, first - self.columns.begin

    def get_seq_length(self) -> int:
        return self.columns.span + self.pending

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def read(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the newest ``length`` columns of one row that a window keeps, ``[kv_heads, n, head_dim]``."""
        stop = self.columns.end - self.base
        start = max(stop - length, self.first_visible() - self.base)
        return self.keys[row, :, start:stop], self.values[row, :, start:stop]

    def write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts a row's newest columns at the end of ``row`` and clears what lies before them."""
        stop = self.columns.end - self.base
        for slab, new in ((self.keys, keys), (self.values, values)):
            slab[row, :, : stop - new.shape[1]] = 0
            slab[row, :, stop - new.shape[1] : stop] = new

    def move_row(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]

    def clear_row(self, row: int) -> None:
        self.keys[row] = 0
        self.values[row] = 0
