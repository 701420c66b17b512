"""Stacks the parts of a projection as one matrix of integers in groups.

Knows nothing of decoders. Dense parts are rounded, packed ones keep their codes; a few rows are in work at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.groups import (
    GROUP,
    PANEL,
    GroupFormat,
    Groups,
    common_format,
    pack_groups,
    panel_bytes,
)
from mlserver_torch_stream.engine.native.packed_rows import PackedRows
from mlserver_torch_stream.engine.native.quantise import BLOCK, quantise
from mlserver_torch_stream.engine.native.unsupported_layout import UnsupportedLayout

_COMPARED = 8  # inputs of each output
_ROUNDING = 4e-3  # of the scales to float16, of an output's largest weight
_NOWHERE = -1  # the part of an output that pads a panel


class GroupedMatrix:
    """``parts``: ``[outputs, inputs]`` each, one behind the other.

    ``interleaved``: there are two, gates and ups, and each panel holds 16 rows of the first and the same of the second.
    """

    def __init__(self, parts: Sequence[Tensor | PackedRows], rounded: GroupFormat, interleaved: bool = False) -> None:
        """``rounded``: the format to which dense parts are rounded."""
        self._parts = parts
        self._rounded = rounded
        self.format = common_format([p.format if isinstance(p, PackedRows) else self._rounded for p in parts])
        self._order = _interleaved(parts) if interleaved else _stacked(parts)
        self._inputs = int(parts[0].shape[1])

    @property
    def bytes(self) -> int:
        return panel_bytes(self.format, sum(part.shape[0] for part in self._parts), self._inputs)

    def pack(self, to: Tensor, kernels: ctypes.CDLL) -> None:
        """Writes the panels, in bytes. Raises UnsupportedLayout, also if the kernels read other weights than these."""
        each = panel_bytes(self.format, PANEL, self._inputs)
        for first in range(0, len(self._order), BLOCK):
            order = self._order[first : first + BLOCK]
            groups = self._rows(order)
            panel = first // PANEL
            panels = to[panel * each : (panel + len(order) // PANEL) * each]
            pack_groups(groups, panels)
            _compare(groups, panels, kernels)

    def _rows(self, order: Tensor) -> Groups:
        count, groups = len(order), -(-self._inputs // GROUP)
        codes = torch.full((count, self._inputs), self.format.offset, dtype=torch.uint8)
        scales = torch.zeros(count, groups * self.format.scales)
        minima = torch.zeros(count, groups) if self.format.minimum else None
        for number, part in enumerate(self._parts):
            places = (order[:, 0] == number).nonzero().flatten()
            if not len(places):
                continue
            rows = order[places, 1]
            taken = part.groups(rows) if isinstance(part, PackedRows) else quantise(part[rows], self._rounded)
            taken = taken.as_format(self.format)
            codes[places], scales[places] = taken.codes, taken.scales
            if minima is not None:
                assert taken.minima is not None
                minima[places] = taken.minima
        return Groups(self.format, codes, scales, minima)


def _compare(groups: Groups, panels: Tensor, kernels: ctypes.CDLL) -> None:
    """Multiplies with a few inputs that are one and else zero, whose products are weights."""
    outputs, inputs = groups.codes.shape
    columns = torch.arange(0, inputs, max(1, inputs // _COMPARED)) if inputs > 1 else torch.zeros(1, dtype=torch.long)
    ones = torch.nn.functional.one_hot(columns, inputs).float()
    got = torch.empty(len(columns), outputs)
    matrix = c.KernelMatrix(panels.data_ptr(), outputs, inputs, None, groups.format.number)
    if kernels.native_multiply(ctypes.byref(matrix), ones.data_ptr(), len(columns), got.data_ptr(), 1):
        raise MemoryError("no memory for a product")
    dense = groups.dense()
    if ((got.t() - dense[:, columns]).abs() > _ROUNDING * dense.abs().amax(1, keepdim=True)).any():
        raise UnsupportedLayout("the kernels read other weights than the file's")


def _stacked(parts: Sequence[Tensor | PackedRows]) -> Tensor:
    """Returns the part and the row of each output, ``[outputs in whole panels, 2]``."""
    order = torch.cat([_places(number, part.shape[0]) for number, part in enumerate(parts)])
    return torch.nn.functional.pad(order, (0, 0, 0, -len(order) % PANEL), value=_NOWHERE)


def _interleaved(parts: Sequence[Tensor | PackedRows]) -> Tensor:
    half = PANEL // 2
    halves = [_places(number, part.shape[0]) for number, part in enumerate(parts)]
    padded = [torch.nn.functional.pad(each, (0, 0, 0, -len(each) % half), value=_NOWHERE) for each in halves]
    return torch.stack([each.view(-1, half, 2) for each in padded], 1).view(-1, 2)


def _places(part: int, rows: int) -> Tensor:
    return torch.stack((torch.full((rows,), part), torch.arange(rows)), 1)
