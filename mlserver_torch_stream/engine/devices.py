"""Devices with memory of their own: whether they still answer, and how large a cache over several of them can be.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


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
