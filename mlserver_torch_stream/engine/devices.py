"""Devices with memory of their own: names, whether they answer, what goes there, how large a cache over several can be.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raises what a device raises that is lost: after an illegal access CUDA answers every call with that error.

    Allocates nothing: a device that is merely full is not lost.
    """
    for device in devices:
        if device.type == "cuda":  # not the device as a whole: that breaks recordings of other models
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def from_host(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """A tensor of these numbers, however nested. Does not wait for what the device has still to do.

    They go through pinned memory, which torch gives out again only when they have gone.
    """
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def spread_budget(room: Mapping[torch.device, int], shares: Mapping[torch.device, float]) -> int:
    """Bytes in all, of which each device holds its share: the one with the least room for its share decides."""
    return int(min(room[device] / share for device, share in shares.items() if share > 0))


def device_name(place: str | int | torch.device) -> str:
    """Of a value of a device map."""
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def execution_device(module: nn.Module) -> str | int | torch.device | None:
    """Where accelerate's hooks have the module compute; None without one."""
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if (place := getattr(part, "execution_device", None)) is not None:
                found: str | int | torch.device = place
                return found
    return None
