"""Handles devices with memory of their own: their names, health and copies.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raises the device's own error if one is lost: after an illegal access CUDA returns that error from every call.

    Allocates nothing, as a full device is not lost.
    """
    for device in devices:
        if device.type == "cuda":  # not the whole device: that would break CUDA graph captures of other models
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def from_host(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of these numbers, however nested. Does not wait for the device's queued work.

    The copy goes through pinned memory, which torch reuses only after the copy.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the host on a device, as ``from_host`` does; itself where it is there already."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def device_name(place: str | int | torch.device) -> str:
    """Returns the name of a device map's value."""
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def execution_device(module: nn.Module) -> str | int | torch.device | None:
    """Returns the device on which accelerate's hooks run the module; None without hooks."""
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if (place := getattr(part, "execution_device", None)) is not None:
                found: str | int | torch.device = place
                return found
    return None


def computing_device(module: nn.Module, place: str | int | torch.device) -> str:
    """Returns the name of the device that computes a module which a device map puts at ``place``.

    Hooks move offloaded weights to a GPU, or to the CPU if there is none.
    """
    device = execution_device(module) if str(place) in ("cpu", "disk") else None
    return device_name(place if device is None else device)
