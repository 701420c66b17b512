"""Packs a decoder's weights for the kernels: panels of 32 outputs in one block of memory, in the order of their use.

Packs them as they are, or as int8 with a scale per output. Knows nothing of modules or of steps.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict

import torch
from torch import Tensor

from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.quantise import BLOCK, quantise
from mlserver_torch_stream.engine.native.structure import Decoder, Projection, UnsupportedLayout

PANEL = 32
_LARGE_PAGE = 1 << 21


class PackedWeights:
    """Copies a decoder's weights, so that its own can be freed. It uses the embedding of an untied model itself.

    ``size`` counts the bytes of the projections.
    """

    def __init__(self, decoder: Decoder, kernels: ctypes.CDLL, int8: bool = False) -> None:
        """Raises UnsupportedLayout."""
        if int8 and decoder.dtype != torch.bfloat16:
            raise UnsupportedLayout(
                f"the model is in {str(decoder.dtype).removeprefix('torch.')}, set dtype to bfloat16"
            )
        self._kept: list[object] = []
        self._int8 = int8
        self.shape = _shape(decoder)
        self._buffer = self._reserve(decoder, kernels)
        self.size = 0
        layers = [self._layer(decoder, index) for index in range(len(decoder.layers))]
        head = self._matrix(decoder.head)
        tied = decoder.head.weights[0] is decoder.embedding
        embedding = None if tied else self._keep(decoder.embedding.contiguous())
        table = (c.KernelLayer * len(layers))(*layers)
        self._kept.append(table)
        self.structure = c.KernelWeights(table, embedding, head, self._vector(decoder.last_norm))

    def _reserve(self, decoder: Decoder, kernels: ctypes.CDLL) -> Tensor:
        item = 1 if self._int8 else decoder.dtype.itemsize
        size = item * sum(_padded(_outputs(matrix)) * matrix.weights[0].shape[1] for matrix in decoder.projections)
        buffer = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
        skip = -buffer.data_ptr() % _LARGE_PAGE
        kernels.native_use_large_pages(buffer[skip:].data_ptr(), size)
        return buffer[skip:]

    def _layer(self, decoder: Decoder, index: int) -> c.KernelLayer:
        layer = decoder.layers[index]
        gates, ups = layer.gate_up.weights
        gate_bias, up_bias = layer.gate_up.biases
        biases = None if gate_bias is None or up_bias is None else _interleaved(gate_bias, up_bias)
        gate_up = Projection((_interleaved(gates, ups),), (biases,))
        norms = [self._vector(layer.norms[name]) if name in layer.norms else None for name in c.KernelNorms.NAMES]
        return c.KernelLayer(
            self._matrix(layer.qkv),
            self._matrix(layer.out),
            self._matrix(gate_up),
            self._matrix(layer.down),
            c.KernelNorms(*norms),
            layer.rotates,
        )

    def _matrix(self, projection: Projection) -> c.KernelMatrix:
        outputs, inputs = _outputs(projection), projection.weights[0].shape[1]
        group = 4 // projection.weights[0].element_size()
        if inputs % group:
            raise UnsupportedLayout(f"a projection of {inputs} inputs")
        stacked = torch.cat(projection.weights) if len(projection.weights) > 1 else projection.weights[0].contiguous()
        item = 1 if self._int8 else stacked.element_size()
        size = _padded(outputs) * inputs * item
        packed = self._buffer[self.size : self.size + size]
        self.size += size
        scales = None
        if self._int8:
            scales = self._vector(_pack_int8(stacked, packed.view(torch.int8)))
        else:
            _pack_words(stacked.view(torch.int32), packed.view(torch.int32))
        return c.KernelMatrix(packed.data_ptr(), outputs, inputs, self._bias(projection), scales)

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


def _pack_int8(weight: Tensor, to: Tensor) -> Tensor:
    """Returns the scales."""
    target = to.view(-1, weight.shape[1] // 2, 2, 2, PANEL // 2)
    scales = []
    for first in range(0, weight.shape[0], BLOCK):
        numbers, scale = quantise(weight[first : first + BLOCK])
        numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -numbers.shape[0] % PANEL))
        pairs = numbers.view(-1, 2, PANEL // 2, weight.shape[1] // 2, 2)
        panel = first // PANEL
        target[panel : panel + pairs.shape[0]] = pairs.permute(0, 3, 1, 4, 2)
        scales.append(scale)
    return torch.cat(scales)


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
