"""Devices with memory of their own: their names, whether they still answer, and how large a cache over several can be.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raises what a device raises that is lost: after an illegal access CUDA answers every call with that error.

    Allocates nothing: a device that is merely full is not lost.
    """
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


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
