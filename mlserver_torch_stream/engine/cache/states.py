"""Holds the states of layers without a key per token, such as convolutions, recurrences and linear attention.

Every state tensor of a layer is ``[slots, ...]``; a sequence has the same slot in all layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from mlserver_torch_stream.engine.cache.layout import CacheLayout

_STATES = ("conv_states", "recurrent_states")


class StateSlots:
    """Copies the states of a batch's sequences into transformers' cache layers and back."""

    def __init__(self, layout: CacheLayout, slots: int) -> None:
        self._slots = slots
        self._empty = dict(layout.state_layers())
        self._held: dict[int, LinearAttentionLayer] = {}

    def fresh(self) -> dict[int, LinearAttentionLayer]:
        """Returns empty layers, by their index, for the first tokens of a sequence."""
        return copy.deepcopy(self._empty)

    def take(self, slots: Sequence[int]) -> dict[int, LinearAttentionLayer]:
        """Returns layers, by their index; their rows are copies of these slots."""
        index_on = _index_on(slots)
        return {
            number: _mapped(layer, lambda state: state.index_select(0, index_on(state.device)))
            for number, layer in self._held.items()
        }

    def put(self, slots: Sequence[int], layers: Mapping[int, LinearAttentionLayer]) -> None:
        """Stores the rows of ``layers`` in these slots.

        Raises MemoryError or torch.OutOfMemoryError without having changed any slot.
        """
        for number in layers.keys() - self._held.keys():
            self._held[number] = _mapped(self._own(number, layers[number]), self._room)
        index_on = _index_on(slots)
        for number, layer in layers.items():
            for (held, name), (source, _) in zip(_tensors(self._held[number]), _tensors(layer), strict=True):
                held[name].index_copy_(0, index_on(held[name].device), source[name])

    def copy(self, source: int, target: int) -> None:
        """Copies all states of the slot ``source`` to the slot ``target``."""
        self.put([target], self.take([source]))

    @property
    def kinds(self) -> set[tuple[str, int]]:
        """The kinds of states that the layers have, such as a convolution's state; ``multiply`` accepts them."""
        layers = self._held.values()
        return {(name, index) for layer in layers for name in _STATES for index in _set(getattr(layer, name))}

    def multiply(self, kind: tuple[str, int], slot: int, factor: float) -> None:
        """Multiplies the states of one kind in a slot that no sequence uses."""
        name, index = kind
        for layer in self._held.values():
            if (state := getattr(layer, name).get(index)) is not None:
                state[slot] *= factor

    def _own(self, number: int, layer: LinearAttentionLayer) -> LinearAttentionLayer:
        """Returns a layer that has only the states of the given layer, which may also have keys."""
        own = copy.copy(self._empty[number])
        for name in vars(own):
            setattr(own, name, getattr(layer, name))
        return own

    def _room(self, state: torch.Tensor) -> torch.Tensor:
        shape = (self._slots, *state.shape[1:])
        try:
            with torch.inference_mode(False):  # a tensor made inside could not be written to outside
                return torch.zeros(shape, dtype=state.dtype, device=state.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the CPU's allocator has no error of its own
            raise MemoryError(f"the states of {self._slots} sequences cannot be allocated on {state.device}") from error

    def bytes_by_device(self) -> dict[torch.device, int]:
        """Returns the bytes of a slot on each device; an empty dict before the first forward."""
        sizes: dict[torch.device, int] = {}
        for layer in self._held.values():
            for states, name in _tensors(layer):
                device = states[name].device
                sizes[device] = sizes.get(device, 0) + states[name][0].nbytes
        return sizes


def _index_on(slots: Sequence[int]) -> Callable[[torch.device], torch.Tensor]:
    """Returns a function that maps a device to ``slots`` as a tensor there; it makes only one copy for each device."""
    return cache(torch.tensor(list(slots), dtype=torch.long).to)


def _tensors(layer: LinearAttentionLayer) -> Iterator[tuple[dict[int, Any], int]]:
    for name in _STATES:
        states = getattr(layer, name)
        yield from ((states, index) for index in _set(states))


def _set(states: Mapping[int, torch.Tensor | None]) -> list[int]:
    return [index for index, state in states.items() if state is not None]


def _mapped(layer: LinearAttentionLayer, change: Callable[[torch.Tensor], torch.Tensor]) -> LinearAttentionLayer:
    """Returns a copy of the layer in which each tensor is replaced by the result of ``change``."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    for states, index in _tensors(twin):
        states[index] = change(states[index])
    return twin
