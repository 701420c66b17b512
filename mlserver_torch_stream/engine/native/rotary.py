"""Holds the cosines and sines of all positions in float32, computed by the model's own rotary module or as it does.

The angles must depend on the position alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlserver_torch_stream.engine.failures import UnsupportedLayout

_POSITIONS = 2048  # at first: a table of 128,000 positions of 64 dimensions would take 64 MiB

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A rotary module of transformers, or its ``RotaryAngles``: gets a tensor of the wanted type and the positions."""


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Computes the cosines and sines of transformers' rotary modules of the static kinds, without their code.

    ``frequencies``: ``[rotated dimensions / 2]``. ``scale`` multiplies cosines and sines.
    """

    frequencies: Tensor
    scale: float

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``positions``: ``[rows, tokens]``. The results have the type of ``x``."""
        angles = positions[..., None].float() * self.frequencies.float()
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.scale).to(x.dtype), (both.sin() * self.scale).to(x.dtype)


def angles_of(module: Any) -> RotaryAngles:
    """Returns the angles of a rotary module. Raises UnsupportedLayout if the module returns other bits."""
    found = RotaryAngles(module.inv_freq, float(module.attention_scaling))
    x, positions = torch.zeros(1), torch.arange(_POSITIONS)[None]
    if not all(map(torch.equal, found(x, positions), module(x, positions))):
        raise UnsupportedLayout("positions whose angles are no products with frequencies")
    return found


class RotaryTable:
    """``cos`` and ``sin``: ``[positions, rotated dimensions / 2]``. The table grows when a sequence needs it."""

    def __init__(self, module: Rotary) -> None:
        self._module = module
        self.cos, self.sin = self._make(_POSITIONS)

    @property
    def half(self) -> int:
        return int(self.cos.shape[1])

    def reach(self, positions: int) -> None:
        if positions > self.cos.shape[0]:
            self.cos, self.sin = self._make(max(positions, 2 * self.cos.shape[0]))

    def _make(self, positions: int) -> tuple[Tensor, Tensor]:
        x = torch.zeros(1, dtype=torch.float32)
        cos, sin = (part[0].float() for part in self._module(x, torch.arange(positions)[None]))
        half = cos.shape[1] // 2
        if not (torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])):
            raise UnsupportedLayout("a rotation of interleaved dimensions")
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()
