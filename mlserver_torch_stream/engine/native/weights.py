"""Packs a decoder's weights for the kernels: panels of 32 outputs in one block of memory, in the order of their use.

Packs dense weights as they are or rounded, packed ones by their codes. Knows nothing of modules or of steps.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict

import torch
from torch import Tensor

from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.grouped_matrix import GroupedMatrix
from mlserver_torch_stream.engine.native.groups import PANEL
from mlserver_torch_stream.engine.native.packed_rows import PackedRows
from mlserver_torch_stream.engine.native.quantise import ROUNDED, Rounding
from mlserver_torch_stream.engine.native.structure import Decoder, Projection, UnsupportedLayout

_LARGE_PAGE = 1 << 21


class PackedWeights:
    """Copies a decoder's weights, so that its own can be freed. It uses the embedding of an untied model itself.

    ``size`` counts the bytes of the projections.
    """

    def __init__(self, decoder: Decoder, kernels: ctypes.CDLL, rounded: Rounding | None = None) -> None:
        """``rounded``: the format to which dense weights are rounded; None: they are not rounded. Raises
        UnsupportedLayout."""
        if rounded is not None and decoder.dtype != torch.bfloat16:
            raise UnsupportedLayout(
                f"the model is in {str(decoder.dtype).removeprefix('torch.')}, set dtype to bfloat16"
            )
        self._kept: list[object] = []
        self._rounded = rounded
        self._decoder, self._kernels, self._dtype = decoder, kernels, decoder.dtype
        self.shape = _shape(decoder)
        self._buffer = self._reserve(decoder, kernels)
        self.size = 0
        layers = [self._layer(decoder, index) for index in range(len(decoder.layers))]
        head = self._matrix(decoder.head)
        embedding, table = None, head
        if decoder.head.weights[0] is not decoder.embedding:
            if isinstance(decoder.embedding, PackedRows):
                table = self._matrix(Projection((decoder.embedding,), (None,)))
            else:
                embedding = self._keep(decoder.embedding.to(self._dtype).contiguous())
        entries = (c.KernelLayer * len(layers))(*layers)
        self._kept.append(entries)
        self.structure = c.KernelWeights(entries, embedding, head, table, self._vector(decoder.last_norm))
        del self._decoder, self._kernels

    def _reserve(self, decoder: Decoder, kernels: ctypes.CDLL) -> Tensor:
        size = sum(self._bytes(projection) for projection in decoder.projections)
        if isinstance(decoder.embedding, PackedRows) and decoder.head.weights[0] is not decoder.embedding:
            size += self._bytes(Projection((decoder.embedding,), (None,)))
        buffer = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
        skip = -buffer.data_ptr() % _LARGE_PAGE
        kernels.native_use_large_pages(buffer[skip:].data_ptr(), size)
        return buffer[skip:]

    def _grouped(self, projection: Projection, interleaved: bool = False) -> GroupedMatrix | None:
        """Returns None for weights that stay dense."""
        if self._rounded is None and not any(isinstance(part, PackedRows) for part in projection.weights):
            return None
        rounding = self._rounded or ROUNDED["int8"]  # of a tensor that a file has dense, beside packed ones
        format = rounding.head if projection is self._decoder.head else rounding.layers
        return GroupedMatrix(projection.weights, format, interleaved)

    def _bytes(self, projection: Projection) -> int:
        grouped = self._grouped(projection)
        if grouped is not None:
            return grouped.bytes
        inputs, item = int(projection.weights[0].shape[1]), int(self._dtype.itemsize)
        return _padded(_outputs(projection)) * inputs * item

    def _layer(self, decoder: Decoder, index: int) -> c.KernelLayer:
        layer = decoder.layers[index]
        gates, ups = layer.gate_up.weights
        gate_bias, up_bias = layer.gate_up.biases
        biases = None if gate_bias is None or up_bias is None else _interleaved(gate_bias, up_bias)
        if isinstance(gates, Tensor) and isinstance(ups, Tensor) and self._rounded is None:
            gate_up = self._matrix(Projection((_interleaved(gates, ups),), (biases,)))
        else:
            gate_up = self._matrix(Projection((gates, ups), (biases, None)), interleaved=True)
        norms = [self._vector(layer.norms[name]) if name in layer.norms else None for name in c.KernelNorms.NAMES]
        return c.KernelLayer(
            self._matrix(layer.qkv),
            self._matrix(layer.out),
            gate_up,
            self._matrix(layer.down),
            c.KernelNorms(*norms),
            layer.rotates,
        )

    def _matrix(self, projection: Projection, interleaved: bool = False) -> c.KernelMatrix:
        outputs, inputs = _outputs(projection), projection.weights[0].shape[1]
        size = self._bytes(projection)
        packed = self._buffer[self.size : self.size + size]
        self.size += size
        grouped = self._grouped(projection, interleaved)
        if grouped is None:
            self._pack_dense(projection, packed)
        else:
            grouped.pack(packed, self._kernels)
        bias = self._gate_up_bias(projection) if interleaved else self._bias(projection)
        number = 0 if grouped is None else grouped.format.number
        return c.KernelMatrix(packed.data_ptr(), outputs, inputs, bias, number)

    def _pack_dense(self, projection: Projection, packed: Tensor) -> None:
        dense = [weight.to(self._dtype) for weight in projection.weights if isinstance(weight, Tensor)]
        group = 4 // dense[0].element_size()
        if dense[0].shape[1] % group:
            raise UnsupportedLayout(f"a projection of {dense[0].shape[1]} inputs")
        stacked = torch.cat(dense) if len(dense) > 1 else dense[0].contiguous()
        _pack_words(stacked.view(torch.int32), packed.view(torch.int32))

    def _gate_up_bias(self, projection: Projection) -> int | None:
        bias = projection.biases[0]  # of both, interleaved already
        return None if bias is None else self._vector(bias)

    def _bias(self, projection: Projection) -> int | None:
        if all(bias is None for bias in projection.biases):
            return None
        parts = [
            torch.zeros(weight.shape[0]) if bias is None else bias.float()
            for weight, bias in zip(projection.weights, projection.biases, strict=True)
        ]
        return self._vector(torch.cat(parts))

    def _vector(self, values: Tensor) -> int:
        padded = torch.zeros(_padded(values.numel()), dtype=torch.float32)
        padded[: values.numel()] = values
        return self._keep(padded)

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return int(tensor.data_ptr())


def _pack_words(words: Tensor, to: Tensor) -> None:
    outputs, inputs = words.shape
    target = to.view(-1, inputs, PANEL)
    whole = outputs // PANEL
    target[:whole].copy_(words[: whole * PANEL].view(whole, PANEL, -1).transpose(1, 2))
    if outputs % PANEL:
        target[whole] = 0
        target[whole, :, : outputs % PANEL] = words[whole * PANEL :].t()


def _shape(decoder: Decoder) -> c.KernelShape:
    layer = decoder.layers[0]
    kind = c.NO_QK_NORM
    if "query" in layer.norms:
        kind = c.WHOLE if decoder.whole_qk_norm else c.PER_HEAD
    if decoder.numbers.head_dim > 512 or decoder.numbers.head_dim * decoder.dtype.itemsize % 4:
        raise UnsupportedLayout(f"heads of {decoder.numbers.head_dim} dimensions")
    return c.KernelShape(
        hidden=decoder.embedding.shape[1],
        inner=layer.down.weights[0].shape[1],
        vocab=decoder.head.weights[0].shape[0],
        layers=len(decoder.layers),
        rotated_half=0,  # ``NativeForward`` sets it
        qk_norm=kind,
        activation=c.SILU if decoder.activation == "silu" else c.GELU_TANH,
        **asdict(decoder.numbers),
    )


def _outputs(projection: Projection) -> int:
    return sum(int(weight.shape[0]) for weight in projection.weights)


def _padded(outputs: int) -> int:
    # Interleaved gates and ups need as much: each half is padded to half a panel.
    return math.ceil(outputs / PANEL) * PANEL


def _interleaved(gates: Tensor, ups: Tensor) -> Tensor:
    """Returns 16 gates and their 16 ups in turn, so that one panel holds both factors of a product."""
    half = PANEL // 2
    missing = -gates.shape[0] % half
    parts = [part.reshape(part.shape[0], -1) for part in (gates, ups)]
    padded = [torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in parts]
    mixed = torch.stack([part.view(-1, half, part.shape[1]) for part in padded], dim=1)
    return mixed.reshape((-1, *gates.shape[1:]))
