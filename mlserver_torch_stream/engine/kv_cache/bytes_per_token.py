"""Computes the bytes of a sequence's cache, in all and on each device that has layers.

Knows nothing of budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers.cache_utils import LinearAttentionLayer

from mlserver_torch_stream.engine.kv_cache import state_layers
from mlserver_torch_stream.engine.kv_cache.slab import SlabLayer


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes of a row: constant states, a column of all full layers, and a column of each windowed one."""

    per_row: int = 0
    per_column: int = 0
    windows: tuple[tuple[int, int], ...] = ()  # (window in columns, bytes per column)

    def of(self, rows: int, columns: int) -> int:
        windowed = sum(min(columns, window_capacity(window)) * size for window, size in self.windows)
        return rows * (self.per_row + columns * self.per_column + windowed)

    def __add__(self, other: CacheCost) -> CacheCost:
        windows = dict(self.windows)
        for window, size in other.windows:
            windows[window] = windows.get(window, 0) + size
        return CacheCost(
            self.per_row + other.per_row, self.per_column + other.per_column, tuple(sorted(windows.items()))
        )


def window_capacity(window: int) -> int:
    # Twice the window: columns that have left it are moved out once in `window` steps instead of at each step.
    return 2 * window


def cost_by_device(layers: Iterable[object]) -> dict[torch.device, CacheCost]:
    """Reads the costs off layers that a forward has written to."""
    costs: dict[torch.device, CacheCost] = {}
    for layer in layers:
        for device, cost in _costs_of(layer):
            costs[device] = costs.get(device, CacheCost()) + cost
    return costs


def _costs_of(layer: object) -> Iterable[tuple[torch.device, CacheCost]]:
    if isinstance(layer, SlabLayer) and layer.is_initialized:
        size = sum(t.shape[1] * t.shape[3] * t.element_size() for t in (layer.keys, layer.values))
        window = layer.window
        yield layer.device, CacheCost(per_column=size) if window is None else CacheCost(windows=((window, size),))
    elif isinstance(layer, LinearAttentionLayer):
        for device, size in state_layers.bytes_per_row(layer):
            yield device, CacheCost(per_row=size)


def device_shares(costs: Mapping[torch.device, CacheCost], columns: int) -> dict[torch.device, float]:
    """Returns the largest part, 0 to 1, that each device holds of any cache up to so many columns.

    If layers with and without windows are on different devices, the parts depend on the length of the rows.
    """
    total = sum(costs.values(), CacheCost())
    return {
        device: max(cost.of(1, length) / total.of(1, length) for length in (1, columns))
        for device, cost in costs.items()
    }
