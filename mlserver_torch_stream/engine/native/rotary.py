"""Tables of the cosines and sines of all positions, in float32, with the values of the model's own rotary module.

The angles must depend only on the position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlserver_torch_stream.engine.failures import UnsupportedLayout

_POSITIONS = 2048  # the first size of a table, because one for 128,000 positions and 64 dimensions would take 64 MiB

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A rotary module of transformers, or its ``RotaryAngles``. It gets a tensor of the wanted dtype and the positions."""


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Computes the same cosines and sines as transformers' rotary modules with static angles, without their code.

    ``frequencies`` have the shape ``[rotated dimensions / 2]``. ``scale`` multiplies cosines and sines.
    """

    frequencies: Tensor
    scale: float

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines in the dtype of ``x``. ``positions`` have the shape ``[rows, tokens]``."""
        angles = positions[..., None].float() * self.frequencies.float()
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.scale).to(x.dtype), (both.sin() * self.scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class KindRotary:
    """The part of transformers' rotary module for one kind of layer, such as layers with a window."""

    module: Any
    kind: str

    @property
    def inv_freq(self) -> Tensor:
        """The inverse frequencies, ``[rotated dimensions / 2]``."""
        found: Tensor = getattr(self.module, f"{self.kind}_inv_freq")
        return found

    @property
    def attention_scaling(self) -> float:
        return float(getattr(self.module, f"{self.kind}_attention_scaling"))

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.module(x, positions, self.kind)
        return cos, sin


@dataclass(frozen=True, slots=True)
class LayerRotary:
    """The rotary embeddings of a model whose layers use different ones."""

    ropes: tuple[Rotary, ...]


def angles_of(rotary: Any) -> list[RotaryAngles]:
    """Returns the ``RotaryAngles`` of each rope of a rotary module.

    Raises UnsupportedLayout unless their results are bit-identical to the module's.
    """
    return [_angles_of(rope) for rope in (rotary.ropes if isinstance(rotary, LayerRotary) else (rotary,))]


def _angles_of(module: Any) -> RotaryAngles:
    found = RotaryAngles(module.inv_freq, float(module.attention_scaling))
    x, positions = torch.zeros(1, dtype=torch.float32), torch.arange(_POSITIONS)[None]
    if not all(map(torch.equal, found(x, positions), _both_halves(module, positions))):
        raise UnsupportedLayout("the model has positions whose angles are not products of position and frequency")
    return found


class RotaryTable:
    """The cosines and sines of all positions used so far, in float32.

    ``cos`` and ``sin`` have the shape ``[positions, ropes, rotated dimensions / 2]``. The table grows when a sequence
    needs it.
    """

    def __init__(self, rotary: Rotary | LayerRotary) -> None:
        """Raises UnsupportedLayout for a rotation that the kernels do not support."""
        self._ropes = rotary.ropes if isinstance(rotary, LayerRotary) else (rotary,)
        self.cos, self.sin = self._make(_POSITIONS)

    @property
    def ropes(self) -> int:
        """The number of different ropes."""
        return len(self._ropes)

    @property
    def half(self) -> int:
        """Half of the rotated dimensions of a head."""
        return int(self.cos.shape[2])

    def reach(self, positions: int) -> None:
        """Extends the table to at least ``positions`` positions."""
        if positions > self.cos.shape[0]:
            self.cos, self.sin = self._make(max(positions, 2 * self.cos.shape[0]))

    def _make(self, positions: int) -> tuple[Tensor, Tensor]:
        tables = [_halves(rope, positions) for rope in self._ropes]
        if len({cos.shape for cos, _ in tables}) > 1:
            raise UnsupportedLayout("the model has layers that rotate different numbers of dimensions")
        cos, sin = (torch.stack(parts, 1) for parts in zip(*tables, strict=True))
        return cos, sin


def _both_halves(rope: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a rope's cosines and sines in float32; gpt-oss's module computes them only for the first half."""
    cos, sin = (part.float() for part in rope(torch.zeros(1, dtype=torch.float32), positions))
    if cos.shape[-1] == len(getattr(rope, "inv_freq", ())):
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def _halves(rope: Rotary, positions: int) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of one half of the rotated dimensions; the other half has the same values."""
    cos, sin = (part[0] for part in _both_halves(rope, torch.arange(positions)[None]))
    half = cos.shape[1] // 2
    if not (torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])):
        raise UnsupportedLayout("the model has a rotation of interleaved dimensions")
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()
