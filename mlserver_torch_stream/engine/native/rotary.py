"""Holds the cosines and sines of all positions in float32, computed by the model's own rotary module.

Knows nothing of the formula of the angles; they must depend on the position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mlserver_torch_stream.engine.native.structure import UnsupportedLayout

_POSITIONS = 2048  # at first: a table of 128,000 positions of 64 dimensions would take 64 MiB


class RotaryTable:
    """``cos`` and ``sin``: ``[positions, rotated dimensions / 2]``. The table grows when a sequence needs it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.cos, self.sin = self._make(_POSITIONS)

    @property
    def half(self) -> int:
        return int(self.cos.shape[1])

    @property
    def positions(self) -> int:
        return len(self.cos)

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
