"""Joins and picks rows of cache layers that have no column per token: convolutions, recurrences, linear attention.

Knows nothing of keys and values; every state tensor is ``[rows, ...]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

_STATES = ("conv_states", "recurrent_states")


def _slots(layer: LinearAttentionLayer) -> Iterator[tuple[dict[int, Any], int]]:
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
    for states, index in _slots(twin):
        states[index] = change(states[index])
    return twin


def pick(layer: LinearAttentionLayer, rows: list[int]) -> LinearAttentionLayer:
    """Returns a new layer with the given rows, in that order."""

    def picked(state: torch.Tensor) -> torch.Tensor:
        return state.index_select(0, torch.tensor(rows, dtype=torch.long, device=state.device))

    return _mapped(layer, picked)


def join(target: LinearAttentionLayer, source: LinearAttentionLayer, copies: int) -> LinearAttentionLayer:
    """Returns ``target`` with row 0 of ``source`` appended ``copies`` times."""
    newcomers = pick(source, [0] * copies)
    if not any(True for _ in _slots(target)):
        return newcomers
    for (states, index), (new_states, new_index) in zip(_slots(target), _slots(newcomers), strict=True):
        new_states[new_index] = torch.cat([states[index], new_states[new_index]])
    return newcomers


def bytes_per_row(layer: LinearAttentionLayer) -> Iterator[tuple[torch.device, int]]:
    """Yields the bytes of a row of each state, with the state's device."""
    for states, index in _slots(layer):
        state = states[index]
        yield state.device, state.numel() * state.element_size() // state.shape[0]
