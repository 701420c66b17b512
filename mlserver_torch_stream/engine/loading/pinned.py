"""Pins the host memory of offloaded weights that a GPU uses, because copies from pageable memory are slower.

At every step, Accelerate's hooks read weights from a dictionary; this module replaces the values of that dictionary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.loading.placement import bytes_of
from mlserver_torch_stream.engine.machine import read_host

logger = logging.getLogger(__name__)

# torch rounds pinned memory up to a power of two, which can be nearly twice a weight's size. So weights share blocks.
_BLOCK = 2**30
_ALIGNMENT = 256
# The part of the host's free memory that stays free: pinned memory cannot be swapped or dropped.
_LEFT = 0.5

Allocate = Callable[[int], torch.Tensor]
"""A callable that allocates this many bytes. Raises RuntimeError if it cannot."""
Room = Callable[[], int]
"""A callable that returns the free bytes of the host."""
Place = tuple[dict[str, torch.Tensor], str]
"""The place where a hook finds a weight: the dictionary that it reads, and the key."""


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def _free() -> int:
    return read_host().available_bytes


def pin_offloaded(
    model: nn.Module, kind: str = "cuda", allocate: Allocate = _pinned, room: Room = _free, block: int = _BLOCK
) -> int:
    """Pins the weights that each step copies from the host to a device of this kind, and returns the pinned bytes.

    Weights are copied into shared blocks of at most ``block`` bytes; a larger weight gets a block of its own. Half of
    the host's free memory stays free. If there is no more room, or pinning fails, the other weights remain as they are.
    Tied weights stay tied.
    """
    weights = _moved(model, kind)
    if not weights:
        return 0
    total = sum(bytes_of(_tensor(places)) for places in weights)
    blocks, done, why = _Blocks(total, allocate, room, block), 0, ""
    try:
        for places in weights:
            copy = blocks.copy(_tensor(places))
            if copy is None:
                why = "; the host has no memory for more"
                break
            for dictionary, key in places:
                dictionary[key] = copy
            done += bytes_of(copy)
    except RuntimeError as error:
        why = f"; pinning more failed: {str(error).splitlines()[0]}"
    logger.info(
        "Pinned %s of the %s of weights that are moved at every step%s", format_bytes(done), format_bytes(total), why
    )
    return done


def release_pinned() -> None:
    """Frees the unused pinned memory that torch caches; older versions of torch cannot free it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None:
        empty()


def _moved(model: nn.Module, kind: str) -> list[list[Place]]:
    """Returns, for each weight, the places where hooks find it; a tied weight has several places."""
    places: dict[tuple[Any, ...], list[Place]] = {}
    for module in model.modules():
        for hook in _offloading(module):
            dictionary = getattr(hook.weights_map.dataset, "state_dict", {})
            if torch.device(hook.execution_device).type != kind:
                continue
            for name, _ in module.named_parameters(recurse=hook.place_submodules):
                key = f"{hook.weights_map.prefix}{name}"
                weight: Any = dictionary.get(key)
                if _plain(weight) and not _resident(hook, weight):
                    same = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
                    places.setdefault(same, []).append((dictionary, key))
    return list(places.values())


def _offloading(module: nn.Module) -> Iterator[Any]:
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "offload", False) and hasattr(part.weights_map, "dataset"):
            yield part


def _plain(weight: Any) -> bool:
    """Returns whether a weight can be pinned. A quantised weight cannot, because it consists of several tensors."""
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.numel() > 0


def _resident(hook: Any, weight: torch.Tensor) -> bool:
    """Returns whether a weight is tied to a weight on the device; then the weight on the device is used for both.

    As in Accelerate, weights are tied if their addresses are equal.
    """
    return bool((hook.tied_params_map or {}).get(weight.data_ptr()))


def _tensor(places: list[Place]) -> torch.Tensor:
    dictionary, key = places[0]
    return dictionary[key]


class _Blocks:
    """Copies tensors of ``total`` bytes, one after another, into as few blocks as possible."""

    def __init__(self, total: int, allocate: Allocate, room: Room, most: int) -> None:
        self._ahead = total
        self._allocate = allocate
        self._room = room
        self._most = most
        self._floor = int(room() * _LEFT)
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the copy of a tensor; None if there is no room for a copy."""
        count = bytes_of(tensor)
        if count > len(self._block):
            size = max(_power(count), min(self._most, _power(self._ahead)))
            if self._room() - size < self._floor:
                return None
            self._block = self._allocate(size)
        part, self._block = self._block[:count], self._block[-(-count // _ALIGNMENT) * _ALIGNMENT :]
        self._ahead -= count
        return part.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _power(count: int) -> int:
    """Returns the smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()
