"""Holds the states of sequences in layers that have no key per token: convolutions, recurrences, linear attention.

Knows nothing of pages. Every state tensor of a layer is ``[slots, ...]``; a sequence has one slot in all layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout

_STATES = ("conv_states", "recurrent_states")


class StateSlots:
    """Gathers the states of a batch's sequences into cache layers of transformers, and puts them back."""

    def __init__(self, layout: CacheLayout, slots: int) -> None:
        self._slots = slots
        self._empty = dict(layout.state_layers())
        self._held: dict[int, LinearAttentionLayer] = {}

    def fresh(self) -> dict[int, LinearAttentionLayer]:
        """Returns a layer without states for each index, for the first tokens of a sequence."""
        return copy.deepcopy(self._empty)

    def take(self, slots: Sequence[int]) -> dict[int, LinearAttentionLayer]:
        """Returns layers with copies of these slots as their rows."""
        return {
            index: _mapped(layer, lambda state: state.index_select(0, _index(slots, state)))
            for index, layer in self._held.items()
        }

    def put(self, slots: Sequence[int], layers: dict[int, LinearAttentionLayer]) -> None:
        """Stores the rows of ``layers`` in these slots."""
        for index, layer in layers.items():
            if index not in self._held:
                self._held[index] = _mapped(layer, self._room)
            for (held, name), (given, _) in zip(_tensors(self._held[index]), _tensors(layer), strict=True):
                held[name].index_copy_(0, _index(slots, held[name]), given[name])

    def copy(self, source: int, target: int) -> None:
        self.put([target], self.take([source]))

    def _room(self, state: torch.Tensor) -> torch.Tensor:
        return torch.zeros((self._slots, *state.shape[1:]), dtype=state.dtype, device=state.device)

    @property
    def bytes_per_slot(self) -> int:
        return sum(self.bytes_by_device().values())

    def bytes_by_device(self) -> dict[torch.device, int]:
        """Returns the bytes of a slot on each device; none before the first forward."""
        found: dict[torch.device, int] = {}
        for layer in self._held.values():
            for states, name in _tensors(layer):
                device = states[name].device
                found[device] = found.get(device, 0) + states[name][0].nbytes
        return found


def _index(slots: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(slots), dtype=torch.long, device=like.device)


def _tensors(layer: LinearAttentionLayer) -> Iterator[tuple[dict[int, Any], int]]:
    for name in _STATES:
        states = getattr(layer, name)
        for index, state in states.items():
            if state is not None:
                yield states, index


def _mapped(layer: LinearAttentionLayer, change: Callable[[torch.Tensor], torch.Tensor]) -> LinearAttentionLayer:
    """Returns a layer with dictionaries of its own, and ``change`` applied to each tensor."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    for states, index in _tensors(twin):
        states[index] = change(states[index])
    return twin
