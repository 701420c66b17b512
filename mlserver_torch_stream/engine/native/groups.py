"""Represents weights as small integers, in groups of 32 inputs with one or two scales and perhaps a minimum.

The kernels read int8 weights, int4 weights and the weights of all GGUF formats in this form. A weight is ``scale *
(code - offset) + minimum``. The offset is the middle of the codes; it is 0 for codes of less than 8 bits if there is a
minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlserver_torch_stream.engine.failures import UnsupportedLayout

GROUP = 32
PANEL = 32


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """The memory layout of groups in a panel. ``number`` is the format's number in ``kernels/grouped.h``."""

    number: int
    bits: int
    minimum: bool
    scales: int  # per group

    @property
    def offset(self) -> int:
        """The code that stands for zero, before the minimum is added."""
        return 0 if self.minimum and self.bits < 8 else 1 << (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        """The bytes of one group of 32 outputs."""
        return GROUP * PANEL * self.bits // 8 + 2 * PANEL * (self.scales + self.minimum)


FOUR = GroupFormat(1, 4, False, 1)
FOUR_MIN = GroupFormat(2, 4, True, 1)
FIVE = GroupFormat(3, 5, False, 1)
FIVE_MIN = GroupFormat(4, 5, True, 1)
SIX_HALVES = GroupFormat(5, 6, False, 2)
EIGHT = GroupFormat(6, 8, False, 1)
EIGHT_MIN_HALVES = GroupFormat(7, 8, True, 2)
_FORMATS = (FOUR, FOUR_MIN, FIVE, FIVE_MIN, SIX_HALVES, EIGHT, EIGHT_MIN_HALVES)


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix of weights as small integers in groups.

    ``codes`` are uint8, ``[outputs, inputs]``; ``scales`` and ``minima`` are float32, ``[outputs, groups]``.

    A format with two scales stores them side by side, ``[outputs, 2 * groups]``.
    """

    format: GroupFormat
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def dense(self) -> Tensor:
        """Returns the weights in float32."""
        width = GROUP // self.format.scales
        grouped = pad(self.codes, (0, -self.codes.shape[1] % GROUP)).float().sub_(self.format.offset)
        weights = grouped.view(len(self.codes), -1, width).mul_(self.scales[..., None]).view(len(self.codes), -1, GROUP)
        if self.minima is not None:
            weights.add_(self.minima[..., None])
        return weights.flatten(1)[:, : self.codes.shape[1]]

    def as_format(self, format: GroupFormat) -> Groups:
        """Returns the same weights in ``format``.

        ``format`` must have at least as many bits and scales, and a minimum if these weights have minima.
        """
        if format == self.format:
            return self
        scales = self.scales.repeat_interleave(format.scales // self.format.scales, 1)
        first = self.scales[:, :: self.format.scales]
        minima = torch.zeros_like(first) if self.minima is None else self.minima
        shift = format.offset - self.format.offset
        if shift < 0:
            minima = minima + shift * first  # a power of two: nothing is rounded
        return Groups(format, self.codes + max(shift, 0), scales, minima if format.minimum else None)


def common_format(formats: Sequence[GroupFormat]) -> GroupFormat:
    """Returns the smallest format that can hold weights of all these formats."""
    bits = max(each.bits for each in formats)
    scales = max(each.scales for each in formats)
    minimum = any(each.minimum for each in formats)
    return next(each for each in _FORMATS if each.bits >= bits and each.minimum >= minimum and each.scales >= scales)


def panel_bytes(format: GroupFormat, outputs: int, inputs: int) -> int:
    """Returns the bytes of a matrix in panels of this format."""
    return -(-outputs // PANEL) * -(-inputs // GROUP) * format.block_bytes


def row_order(counts: Sequence[int], interleaved: bool = False) -> Tensor:
    """Returns, for each output of the panels, its row in the stacked parts, whose numbers of rows are ``counts``.

    The row is -1 for an output that pads a panel. If ``interleaved`` is true, the two parts are gates and ups, and each
    panel has the same 16 rows of both parts.
    """
    rows = torch.arange(sum(counts))
    if not interleaved:
        return pad(rows, (0, -len(rows) % PANEL), value=-1)
    half = PANEL // 2
    gates, ups = (pad(part, (0, -len(part) % half), value=-1).view(-1, half) for part in rows.split(list(counts)))
    return torch.stack((gates, ups), 1).flatten()


def _high_bits(quads: Tensor, bits: int) -> Tensor:
    """Joins the high bits of quads ``[…, quads, outputs, 4]``: ``[…, bytes, outputs / 2, 4]``.

    From its lowest bits on, a byte has the bits of both halves of the outputs in a quad, then those in the next quad.
    """
    fields = torch.stack(quads.split(PANEL // 2, 3), 3).flatten(2, 3).unflatten(2, (-1, 8 // bits))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1, 1)
    joined: Tensor = (fields << shifts).sum(3, dtype=torch.uint8)
    return joined


def pack_groups(groups: Groups, to: Tensor) -> None:
    """Writes the panels of some outputs to ``to``, as bytes. Raises UnsupportedLayout for scales beyond float16."""
    format, missing = groups.format, -len(groups.codes) % PANEL
    padding = (0, -groups.codes.shape[1] % GROUP, 0, missing)
    codes = pad(groups.codes, padding, value=format.offset)
    panels, count = len(codes) // PANEL, codes.shape[1] // GROUP
    target = to.view(panels, count, format.block_bytes)
    quads = codes.view(panels, PANEL, count, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    taken = GROUP * PANEL * format.bits // 8
    if format.bits == 8:
        target[:, :, :taken] = quads.reshape(panels, count, taken)
    else:
        low, high = (quads & 15).split(PANEL // 2, 3)
        target[:, :, : GROUP * PANEL // 2] = (low | (high << 4)).reshape(panels, count, -1)
    if 4 < format.bits < 8:
        target[:, :, GROUP * PANEL // 2 : taken] = _high_bits(quads >> 4, format.bits - 4).reshape(panels, count, -1)
    for values, width in ((groups.scales, format.scales), (groups.minima, 1)):
        if values is None:
            continue
        halves = pad(values, (0, 0, 0, missing)).half()
        if not halves.isfinite().all():
            raise UnsupportedLayout("the model has weights that are not finite, or larger than float16 holds")
        size = 2 * PANEL * width
        ordered = halves.view(panels, PANEL, count, width).permute(0, 2, 3, 1).contiguous()
        target[:, :, taken : taken + size] = ordered.view(panels, count, -1).view(torch.uint8)
        taken += size
