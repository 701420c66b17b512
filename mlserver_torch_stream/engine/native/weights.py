"""Writes the weights of a decoder in the memory layout that the kernels read: dense, or as integers in groups.

Dense weights are packed unchanged or rounded; weights that are already packed keep their codes. Only a few rows are
converted at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlserver_torch_stream.engine.failures import UnsupportedLayout
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
from mlserver_torch_stream.engine.native.panels_file import PanelsFile
from mlserver_torch_stream.engine.native.quantise import BLOCK, ROUNDED, Rounding, quantise
from mlserver_torch_stream.engine.native.structure import Decoder, DecoderLayer, Projection

# The weights that are compared of each output: in so many groups, those at these places of the first group, and later
# ones in the others. Few groups, because each of their blocks has to be converted.
_COMPARED_GROUPS, _COMPARED_PLACES, _LATER = 4, torch.tensor([0, 13]), 7
_OTHER_INPUTS = "the model has a matrix whose parts have different numbers of inputs"
_OTHER_WEIGHTS = "the kernels read weights that differ from the packed ones"
_ROUNDING = 4e-3  # error of rounding scales to float16, relative to an output's largest weight


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs weights with the kernels.

    With ``compares``, the weights in the panels are compared with the model's: all dense weights, and a few of each
    output that is in groups, as the kernels read them.
    """

    kernels: ctypes.CDLL
    threads: int = 1
    compares: bool = True

    def pack(self, parts: Sequence[tuple[Tensor, int]], order: Tensor, groups: int, format: int, to: Tensor) -> None:
        """Makes the kernels write panels of this ``format`` to ``to``, a tensor of bytes.

        Each of the ``parts`` has the addresses of its rows, and the number of the rows' block format. ``order`` is the
        ``row_order`` of the parts. ``groups`` is the number of groups in a row or, for a dense row, of 32-bit words.
        Raises UnsupportedLayout if the kernels refuse the weights.
        """
        addresses = [part for part, _ in parts]
        kinds = [torch.full((len(part),), kind) for part, kind in parts]
        real = order >= 0
        rows = torch.zeros(len(order), 2, dtype=torch.long)
        rows[real] = torch.stack((torch.cat(addresses), torch.cat(kinds)), 1)[order[real]]
        call = c.KernelPackCall(rows.data_ptr(), len(rows), groups, format, to.data_ptr())
        try:
            self.kernels.native_pack(ctypes.byref(call), self.threads)
        except RuntimeError as error:
            raise UnsupportedLayout(str(error)) from None


class GroupedMatrix:
    """A matrix in one format, made of stacked ``parts`` such as queries, keys and values.

    Each part is ``[outputs, inputs]``. ``order``, the result of ``row_order``, maps each output of the panels to the
    stacked row that it belongs to. ``interleaved`` means that the parts are the gates and the ups of an MLP, and that
    each panel has 16 rows of both.
    """

    def __init__(
        self,
        parts: Sequence[Tensor | PackedRows],
        rounded: GroupFormat,
        interleaved: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``rounded`` is the format to which dense parts are rounded, after they have been converted to ``dtype``."""
        self._parts = parts
        self._rounded = rounded
        self._dtype = dtype
        self.format = common_format([p.format if isinstance(p, PackedRows) else self._rounded for p in parts])
        self.outputs = sum(part.shape[0] for part in parts)
        self.order = row_order([part.shape[0] for part in parts], interleaved)
        self._inputs = int(parts[0].shape[1])

    @property
    def number(self) -> int:
        """The number by which the kernels know the format."""
        return self.format.number

    @property
    def bytes(self) -> int:
        """The size of the packed matrix."""
        return panel_bytes(self.format, len(self.order), self._inputs)

    def pack(self, to: Tensor, packer: Packer) -> None:
        """Writes the panels to ``to``, as bytes.

        Raises UnsupportedLayout, for example if the kernels would not read the same weights from the panels.
        """
        blocks = [part for part in self._parts if isinstance(part, PackedRows)]
        if len(blocks) == len(self._parts):
            self._pack_blocks(blocks, to, packer)
            return
        each = panel_bytes(self.format, PANEL, self._inputs)
        for order, panels in zip(self.order.split(BLOCK), to.split(BLOCK // PANEL * each), strict=True):
            groups = self._rows(order)
            pack_groups(groups, panels)
            if packer.compares:
                dense = groups.dense()
                self._compare(dense[:, self._columns], dense.abs().amax(1, keepdim=True), panels, packer)

    def _pack_blocks(self, parts: Sequence[PackedRows], to: Tensor, packer: Packer) -> None:
        """Makes the kernels read the blocks in place; the blocks may be in a mapped file."""
        if any(part.shape[1] != self._inputs or part.data.stride(1) != 1 for part in parts):
            raise UnsupportedLayout(_OTHER_INPUTS)
        packer.pack(
            [(part.addresses, part.number) for part in parts], self.order, self._inputs // GROUP, self.format.number, to
        )
        if packer.compares:
            real = self.order >= 0
            sampled = [
                torch.cat(values) for values in zip(*(part.sampled(self._columns) for part in parts), strict=True)
            ]
            weights, largest = (torch.where(real[:, None], values[self.order], 0.0) for values in sampled)
            self._compare(weights, largest, to, packer)

    @property
    def _columns(self) -> Tensor:
        """The inputs whose weights are compared."""
        numbers = torch.arange(_COMPARED_GROUPS)
        firsts = numbers * self._inputs // _COMPARED_GROUPS // GROUP * GROUP
        columns = firsts[:, None] + (_COMPARED_PLACES + _LATER * numbers[:, None]) % GROUP
        return columns[columns < self._inputs].unique()

    def _compare(self, weights: Tensor, largest: Tensor, panels: Tensor, packer: Packer) -> None:
        """Compares the ``weights`` of a few inputs, ``[outputs, inputs]``, with the weights that the kernels read.

        To show a weight, the kernels multiply the matrix by an input that is 1 in one place and 0 elsewhere.
        ``largest`` is the largest magnitude of each output's weights, ``[outputs, 1]``.
        """
        ones = torch.nn.functional.one_hot(self._columns, self._inputs).float()
        got = torch.empty(len(ones), len(weights), dtype=torch.float32)
        matrix = c.KernelMatrix.of(self._inputs, c.KernelRun(panels.data_ptr(), len(weights), self.number))
        pool = c.torch_pool()
        packer.kernels.native_multiply(
            *(ctypes.byref(matrix), ones.data_ptr(), len(ones), got.data_ptr(), False, pool, packer.threads)
        )
        if ((got.t() - weights).abs() > _ROUNDING * largest).any():
            raise UnsupportedLayout(_OTHER_WEIGHTS)

    def _rows(self, order: Tensor) -> Groups:
        count, groups = len(order), -(-self._inputs // GROUP)
        codes = torch.full((count, self._inputs), self.format.offset, dtype=torch.uint8)
        scales = torch.zeros(count, groups * self.format.scales, dtype=torch.float32)
        minima = torch.zeros(count, groups, dtype=torch.float32) if self.format.minimum else None
        first = 0  # the row of the part in the stacked matrix
        for part in self._parts:
            places = ((order >= first) & (order < first + part.shape[0])).nonzero().flatten()
            rows = order[places] - first
            first += part.shape[0]
            if not len(places):
                continue
            packed = (
                part.groups(rows)
                if isinstance(part, PackedRows)
                else quantise(part[rows].to(self._dtype), self._rounded)
            )
            packed = packed.as_format(self.format)
            codes[places], scales[places] = packed.codes, packed.scales
            if minima is not None:
                assert packed.minima is not None
                minima[places] = packed.minima
        return Groups(self.format, codes, scales, minima)


def grouped_matrices(
    parts: Sequence[Tensor | PackedRows],
    rounded: GroupFormat,
    interleaved: bool = False,
    dtype: torch.dtype | None = None,
) -> list[GroupedMatrix]:
    """Returns the runs of a projection's matrix: one for each part if the parts differ in format, otherwise one.

    ``rounded`` and ``dtype`` are those of ``GroupedMatrix``.

    Parts that share a panel are in one run, in a format that can hold the weights of all of them.
    """
    each = [GroupedMatrix([part], rounded, dtype=dtype) for part in parts]
    differ = len({matrix.format for matrix in each}) > 1 and len({part.shape[1] for part in parts}) == 1
    if differ and not interleaved and not any(part.shape[0] % PANEL for part in parts[:-1]):
        return each
    return [GroupedMatrix(parts, rounded, interleaved, dtype)]


_LARGE_PAGE = 1 << 21


class PackedWeights:
    """Copies a decoder's weights, so that the decoder's own weights can be freed.

    The embedding of an untied model is kept, not copied. ``size`` counts the bytes of the projections.
    """

    def __init__(
        self, decoder: Decoder, packer: Packer, rounded: Rounding | None = None, file: PanelsFile | None = None
    ) -> None:
        """``rounded`` is the format to which dense weights are rounded; None means that they are not rounded.

        With a ``file`` the panels of an earlier load are mapped. If there are none, or if the panels are to be compared
        with the weights, the weights are packed and the file is written.

        Raises UnsupportedLayout if the kernels do not support the weights.
        """
        if rounded is not None and decoder.dtype != torch.bfloat16:
            raise UnsupportedLayout(
                f"the model is in {str(decoder.dtype).removeprefix('torch.')}; set dtype to bfloat16"
            )
        self._kept: list[object] = []
        self._rounded = rounded
        self._decoder, self._packer, self._dtype = decoder, packer, decoder.dtype
        self.shape = _shape(decoder)
        matrices = (matrix for projection in decoder.projections for matrix in self._runs(projection))
        routers = (self._router_matrix(layer.router) for layer in decoder.layers if layer.router is not None)
        size, kernels = sum(matrix.bytes for matrix in chain(matrices, routers)), packer.kernels
        mapped = None if file is None or packer.compares else file.read(size, kernels, packer.threads)
        if mapped is None:
            buffer = in_large_pages(size, kernels)
            self.structure = self._structure(buffer, packs=True)
            mapped = None if file is None else file.keep(buffer[:size], kernels, packer.threads)
        if mapped is not None:  # other servers share this memory
            self.structure = self._structure(mapped, packs=False)
        del self._decoder, self._packer

    def _structure(self, buffer: Tensor, packs: bool) -> c.KernelWeights:
        """Returns the weights as the kernels read them from ``buffer``. With ``packs``, first packs them to there."""
        decoder, self._buffer, self._packs, self.size = self._decoder, buffer, packs, 0
        self._kept.clear()
        entries = (c.KernelLayer * len(decoder.layers))(*map(self._layer, decoder.layers))
        self._kept.append(entries)
        head = self._matrix(decoder.head)
        embedding, table = None, head
        if decoder.table is not None:
            table = self._matrix(decoder.table)
        elif isinstance(decoder.embedding, Tensor) and decoder.embedding is not decoder.head.weights[0]:
            # Detached: a parameter of transformers' model would lose this memory if the model is converted.
            embedding = self._keep(decoder.embedding.detach().to(self._dtype).contiguous())
            table = c.KernelMatrix(len(decoder.embedding))  # only its size
        return c.KernelWeights(entries, embedding, head, table, self._vector(decoder.last_norm))

    def _runs(self, projection: Projection) -> Sequence[GroupedMatrix | DenseMatrix]:
        if projection.experts > 1:
            return [run for matrix in projection.matrices for run in self._runs(matrix)]
        if self._rounded is None and not any(isinstance(part, PackedRows) for part in projection.weights):
            return [DenseMatrix(projection.weights, self._dtype, projection.interleaved)]
        rounding = self._rounded or ROUNDED["int8"]  # dense tensors of a file with packed weights are rounded too
        format = rounding.head if projection is self._decoder.head else rounding.layers
        dtype = None if self._rounded is None else self._dtype
        return grouped_matrices(projection.weights, format, projection.interleaved, dtype)

    def _router_matrix(self, router: Projection) -> DenseMatrix:
        return DenseMatrix(router.weights, self._dtype, False)

    def _layer(self, layer: DecoderLayer) -> c.KernelLayer:
        norms = [self._vector(layer.norms[name]) if name in layer.norms else None for name in c.KernelNorms.NAMES]
        return c.KernelLayer(
            self._matrix(layer.qkv),
            self._matrix(layer.out),
            self._matrix(layer.gate_up),
            self._matrix(layer.down),
            self._router(layer.router),
            c.KernelNorms(*norms),
            layer.rope,
            None if layer.sinks is None else self._vector(layer.sinks),
        )

    def _matrix(self, projection: Projection) -> c.KernelMatrix:
        matrices = self._runs(projection)
        runs = [self._run(matrix) for matrix in matrices]
        if projection.experts > 1:  # all experts have the same sizes, and are one run
            if len({(matrix.outputs, matrix.number) for matrix in matrices}) > 1 or len(runs) != projection.experts:
                raise UnsupportedLayout("the model has experts of different sizes or formats")
            runs = [c.KernelRun(runs[0].panels, sum(len(matrix.order) for matrix in matrices), runs[0].format)]
        return c.KernelMatrix.of(int(projection.weights[0].shape[1]), *runs, bias=self._bias(projection))

    def _router(self, router: Projection | None) -> c.KernelMatrix:
        if router is None:
            return c.KernelMatrix()
        run = self._run(self._router_matrix(router))
        return c.KernelMatrix.of(int(router.weights[0].shape[1]), run, bias=self._bias(router))

    def _run(self, matrix: GroupedMatrix | DenseMatrix) -> c.KernelRun:
        panels = self._buffer[self.size : self.size + matrix.bytes]
        self.size += matrix.bytes
        if self._packs:
            matrix.pack(panels, self._packer)
        return c.KernelRun(panels.data_ptr(), matrix.outputs, matrix.number)

    def _bias(self, projection: Projection) -> int | None:
        if all(bias is None for bias in projection.biases):
            return None
        return self._vector(torch.cat([self._padded_bias(matrix) for matrix in projection.matrices]))

    def _padded_bias(self, projection: Projection) -> Tensor:
        dtype = self._decoder.dense_dtype  # the biases of experts are in the dtype of their file
        parts = [
            torch.zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.to(dtype or bias.dtype).float()
            for weight, bias in zip(projection.weights, projection.biases, strict=True)
        ]
        order = row_order([len(part) for part in parts], projection.interleaved)
        return torch.where(order < 0, 0.0, torch.cat(parts)[order])

    def _vector(self, values: Tensor) -> int:
        return self._keep(pad(values.float(), (0, -values.numel() % PANEL)))

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return int(tensor.data_ptr())


class DenseMatrix:
    """Stacks a projection's parts as one dense matrix ``[outputs, inputs]`` of ``dtype``, like ``GroupedMatrix``."""

    number = 0  # kPlain of ``kernels/grouped.h``

    def __init__(self, parts: Sequence[Tensor | PackedRows], dtype: torch.dtype, interleaved: bool) -> None:
        """``parts`` must be tensors."""
        self._parts = parts
        self._dtype = dtype
        self.outputs = sum(part.shape[0] for part in parts)
        self.order = row_order([part.shape[0] for part in parts], interleaved)
        self.bytes = len(self.order) * int(parts[0].shape[1]) * dtype.itemsize

    def pack(self, to: Tensor, packer: Packer) -> None:
        """Writes the panels to ``to``, as bytes. Raises UnsupportedLayout if the kernels do not support the parts."""
        dense = [part.to(self._dtype).contiguous() for part in self._parts if isinstance(part, Tensor)]
        inputs = dense[0].shape[1]
        bytes_of_row = inputs * dense[0].itemsize
        if bytes_of_row % 4:
            raise UnsupportedLayout(
                f"the model has a projection with {inputs} inputs, whose rows are not a multiple of 4 bytes"
            )
        if any(part.shape[1] != inputs for part in dense):
            raise UnsupportedLayout(_OTHER_INPUTS)
        addresses = [part.data_ptr() + torch.arange(len(part)) * bytes_of_row for part in dense]
        packer.pack([(part, 0) for part in addresses], self.order, bytes_of_row // 4, self.number, to)
        if packer.compares:
            self._compare(dense, to.view(torch.int32).view(-1, bytes_of_row // 4, PANEL))

    def _compare(self, dense: Sequence[Tensor], panels: Tensor) -> None:
        """Compares the bits of all weights with those in the panels, ``[panels, words, outputs]`` as in ``gemm.h``."""
        outputs = self.order.argsort()[-self.outputs :]  # of each stacked row; outputs that pad a panel come first
        for part, of_part in zip(dense, outputs.split([len(part) for part in dense]), strict=True):
            for rows, at in zip(part.split(BLOCK), of_part.split(BLOCK), strict=True):
                words = panels[at // PANEL, :, at % PANEL].contiguous()
                if not torch.equal(words.view(torch.int16), rows.view(torch.int16)):
                    raise UnsupportedLayout(_OTHER_WEIGHTS)


def in_large_pages(size: int, kernels: ctypes.CDLL) -> Tensor:
    """Returns at least ``size`` bytes in large pages (2 MiB); the memory begins at the start of such a page."""
    buffer = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % _LARGE_PAGE :]
    kernels.native_use_large_pages(buffer.data_ptr(), size)
    return buffer


def _shape(decoder: Decoder) -> c.KernelShape:
    kind = c.NO_QK_NORM
    if "query" in decoder.layers[0].norms:
        kind = c.WHOLE if decoder.whole_qk_norm else c.PER_HEAD
    if decoder.numbers.head_dim > 512 or decoder.numbers.head_dim * decoder.dtype.itemsize % 4:
        limits = "the kernels support at most 512, and only multiples of 4 bytes"
        raise UnsupportedLayout(f"the model has heads of {decoder.numbers.head_dim} dimensions; {limits}")
    return c.KernelShape(
        hidden=decoder.embedding.shape[1],
        vocab=decoder.head.weights[0].shape[0],
        layers=len(decoder.layers),
        rotated_half=0,  # ``NativeForward`` sets it, and ``ropes``
        ropes=0,
        qk_norm=kind,
        activation=c.ACTIVATIONS.index(decoder.activation),
        **asdict(decoder.numbers),
    )
