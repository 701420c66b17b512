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
    row_order,
)
from mlserver_torch_stream.engine.native.packed_rows import PackedRows
from mlserver_torch_stream.engine.native.quantise import BLOCK, quantise
from mlserver_torch_stream.engine.native.unsupported_layout import UnsupportedLayout

_COMPARED = 8  # inputs of each output
_ROUNDING = 4e-3  # of the scales to float16, of an output's largest weight


class GroupedMatrix:
    """One matrix of a projection, such as that of queries, keys and values, whose weights ``parts`` are stacked.

    Each part is ``[outputs, inputs]``. ``order``, the result of ``row_order``, names the stacked row of each output in
    the panels. ``interleaved``: the parts are the gates and the ups of an MLP, and each panel takes 16 rows of both.
    """

    def __init__(self, parts: Sequence[Tensor | PackedRows], rounded: GroupFormat, interleaved: bool = False) -> None:
        """``rounded``: the format to which dense parts are rounded."""
        self._parts = parts
        self._rounded = rounded
        self.format = common_format([p.format if isinstance(p, PackedRows) else self._rounded for p in parts])
        self.order = row_order([part.shape[0] for part in parts], interleaved)
        self._inputs = int(parts[0].shape[1])

    @property
    def number(self) -> int:
        return self.format.number

    @property
    def bytes(self) -> int:
        return panel_bytes(self.format, len(self.order), self._inputs)

    def pack(self, to: Tensor, kernels: ctypes.CDLL) -> None:
        """Writes the panels, in bytes. Raises UnsupportedLayout, also if the kernels read other weights than these."""
        each = panel_bytes(self.format, PANEL, self._inputs)
        for order, panels in zip(self.order.split(BLOCK), to.split(BLOCK // PANEL * each), strict=True):
            groups = self._rows(order)
            pack_groups(groups, panels)
            _compare(groups, panels, kernels)

    def _rows(self, order: Tensor) -> Groups:
        count, groups = len(order), -(-self._inputs // GROUP)
        codes = torch.full((count, self._inputs), self.format.offset, dtype=torch.uint8)
        scales = torch.zeros(count, groups * self.format.scales)
        minima = torch.zeros(count, groups) if self.format.minimum else None
        first = 0  # row of the part among the stacked ones
        for part in self._parts:
            places = ((order >= first) & (order < first + part.shape[0])).nonzero().flatten()
            rows = order[places] - first
            first += part.shape[0]
            if not len(places):
                continue
            taken = part.groups(rows) if isinstance(part, PackedRows) else quantise(part[rows], self._rounded)
            taken = taken.as_format(self.format)
            codes[places], scales[places] = taken.codes, taken.scales
            if minima is not None:
                assert taken.minima is not None
                minima[places] = taken.minima
        return Groups(self.format, codes, scales, minima)


def _compare(groups: Groups, panels: Tensor, kernels: ctypes.CDLL) -> None:
    """Compares a few weights of each output: their products with an input of ones and zeros are the weights."""
    outputs, inputs = groups.codes.shape
    columns = torch.arange(0, inputs, max(1, inputs // _COMPARED)) if inputs > 1 else torch.zeros(1, dtype=torch.long)
    ones = torch.nn.functional.one_hot(columns, inputs).float()
    got = torch.empty(len(columns), outputs)
    matrix = c.KernelMatrix(panels.data_ptr(), outputs, inputs, None, groups.format.number)
    kernels.native_multiply(ctypes.byref(matrix), ones.data_ptr(), len(columns), got.data_ptr(), 1)
    dense = groups.dense()
    if ((got.t() - dense[:, columns]).abs() > _ROUNDING * dense.abs().amax(1, keepdim=True)).any():
        raise UnsupportedLayout("the kernels read other weights than were packed")
