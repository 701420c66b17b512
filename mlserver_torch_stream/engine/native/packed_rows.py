"""Holds the weights of a projection or an embedding as blocks of a GGUF file, and defines modules that use them.

A module computes in float32, a few rows at a time. These modules are slow, and serve as the reference for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.native import groups as formats
from mlserver_torch_stream.engine.native.groups import GROUP, GroupFormat, Groups

_AT_ONCE = 1 << 20  # weights that are held in float32 at a time


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block format of GGUF: its ``number`` in ``kernels/pack.h``, a block's weights and bytes, and its conversion."""

    number: int
    weights: int
    bytes: int
    format: GroupFormat
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]  # blocks to codes, scales and minima


class PackedRows:
    """Rows of weights as blocks. ``data`` is uint8, ``[outputs, bytes]``. ``kind`` is a name in ``BLOCK_FORMATS``.

    ``heads`` is 0 if ``data`` has the rows in the model's order. Otherwise it is the number of heads, in each of which
    ``data`` has the two dimensions that are rotated together next to each other, and the model half a head apart.
    """

    def __init__(self, kind: str, data: Tensor, heads: int = 0) -> None:
        self.kind = kind
        self.data = data
        self.heads = heads
        self._of = BLOCK_FORMATS[kind]
        self.shape = torch.Size((data.shape[0], data.shape[1] // self._of.bytes * self._of.weights))

    @property
    def format(self) -> GroupFormat:
        return self._of.format

    @property
    def number(self) -> int:
        """The number of the block format in ``kernels/pack.h``."""
        return self._of.number

    @property
    def order(self) -> Tensor:
        """The row of ``data`` for each output."""
        return rotary_halves(len(self.data), self.heads)

    @property
    def addresses(self) -> Tensor:
        """The address of each output's row, whose bytes are contiguous."""
        return self.data.data_ptr() + self.order * self.data.stride(0)

    def sampled(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights of some inputs, float32 ``[outputs, columns]``.

        Also returns each output's largest magnitude in the blocks of these inputs, ``[outputs, 1]``.
        """
        width = self._of.weights
        blocks = self.data.view(len(self.data), -1, self._of.bytes)
        numbers, of_column = (columns // width).unique(return_inverse=True)
        places = of_column * width + columns % width
        weights, largest = [], []
        for some in blocks.split(max(1, _AT_ONCE // (len(numbers) * width))):
            dense = PackedRows(self.kind, some[:, numbers].flatten(1)).groups(slice(None)).dense()
            weights.append(dense[:, places])
            largest.append(dense.abs().amax(1, keepdim=True))
        return torch.cat(weights)[self.order], torch.cat(largest)[self.order]

    def chunk(self, count: int) -> tuple[PackedRows, ...]:
        """Divides the outputs into parts of equal size, as ``torch.chunk`` does."""
        assert not self.heads  # files have fused projections in the model's order
        return tuple(PackedRows(self.kind, part) for part in self.data.chunk(count))

    def groups(self, rows: Tensor | slice) -> Groups:
        data = self.data[self.order[rows] if self.heads else rows]
        codes, scales, minima = self._of.read(data.reshape(-1, self._of.bytes))
        count = len(data)
        return Groups(
            self._of.format,
            codes.reshape(count, -1),
            scales.reshape(count, -1),
            None if minima is None else minima.reshape(count, -1),
        )


def rotary_halves(rows: int, heads: int) -> Tensor:
    """Returns, for each row of the model, the row of a file with ``heads`` as in ``PackedRows``."""
    order = torch.arange(rows)
    return order.view(heads, -1, 2).transpose(1, 2).flatten() if heads else order


class PackedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer over packed rows.

    ``weight`` has the shape of the unpacked rows, but no values before ``unpack``.
    """

    def __init__(self, rows: PackedRows, bias: Tensor | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.weight = _placeholder(rows)
        self._unpacked = False
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def unpack(self) -> None:
        """Makes ``weight`` hold the rows in float32, which no forward has to convert again."""
        weight = torch.empty(self.rows.shape, dtype=torch.float32)
        for few in _few(self.rows):
            weight[few] = self.rows.groups(few).dense()
        self.weight, self._unpacked = nn.Parameter(weight, requires_grad=False), True

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight.to(x.dtype)) if self._unpacked else _product(x, self.rows)
        return out if self.bias is None else out + self.bias


def unpack(model: nn.Module, limit: int) -> None:
    """Unpacks those linear layers of a model that together fit ``limit`` bytes."""
    for module in model.modules():
        size = module.weight.numel() * module.weight.itemsize if isinstance(module, PackedLinear) else 0
        if 0 < size <= limit:
            limit -= size
            module.unpack()


class PackedExperts(nn.Module):  # type: ignore[misc]
    """The experts of a layer over packed rows, each a matrix of the experts' rows one after the other.

    ``gate_up_proj`` and ``down_proj`` have the shapes of the unpacked weights, but no values.
    """

    def __init__(self, experts: Any, gates: PackedRows, ups: PackedRows, downs: PackedRows) -> None:
        """``experts`` is the module with dense weights."""
        super().__init__()
        count = len(experts.down_proj)
        pairs = zip(gates.chunk(count), ups.chunk(count), strict=True)
        self.gates_and_ups = [rows for pair in pairs for rows in pair]
        self.downs = list(downs.chunk(count))
        self.act_fn = experts.act_fn
        self.gate_up_proj, self.down_proj = _placeholder(experts.gate_up_proj), _placeholder(experts.down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, choices = torch.where(top_k_index == expert)
            gate, up = (_product(hidden_states[rows], part) for part in self.gates_and_ups[2 * expert : 2 * expert + 2])
            found = _product(self.act_fn(gate) * up, self.downs[expert])
            out.index_add_(0, rows, (found * top_k_weights[rows, choices, None]).to(out.dtype))
        return out


class PackedEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding over packed rows, multiplied by ``scale``.

    ``weight`` has the shape of the unpacked rows, but no values.
    """

    def __init__(self, rows: PackedRows, scale: float = 1.0) -> None:
        super().__init__()
        self.rows = rows
        self.scale = scale
        self.weight = _placeholder(rows)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows.groups(ids.flatten()).dense().mul_(self.scale).view(*ids.shape, -1).to(self.weight.dtype)


def embedding_scale(module: nn.Module) -> float:
    """Calls an embedding to measure the factor by which it multiplies its rows.

    Raises UnsupportedLayout if the embedding changes its rows in any other way.
    """
    if isinstance(module, PackedEmbedding):
        return module.scale
    if isinstance(module, nn.Embedding) and len(list(module.parameters())) == 1:
        row = torch.linspace(-2.0, 1.0, module.weight.shape[1], dtype=module.weight.dtype)
        got = functional_call(module, {"weight": row.expand(module.weight.shape)}, torch.zeros(1, dtype=torch.long))[0]
        scale = float(got[-1])
        if torch.allclose(got.float(), row.float() * scale, rtol=0.02, atol=1e-6):
            return scale
    raise UnsupportedLayout(f"the model has embeddings of type {type(module).__name__}")


def _placeholder(like: PackedRows | Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros(()).expand(like.shape), requires_grad=False)


def _product(x: Tensor, rows: PackedRows) -> Tensor:
    return torch.cat([linear(x, rows.groups(few).dense().to(x.dtype)) for few in _few(rows)], -1)


def _few(rows: PackedRows) -> Iterator[slice]:
    """Yields as many rows as are held in float32 at a time."""
    outputs, inputs = rows.shape
    count = max(1, _AT_ONCE // inputs)
    for first in range(0, outputs, count):
        yield slice(first, first + count)


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Returns the low four bits of 16 bytes, followed by their high four bits."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Returns the bits of 4 bytes, each as 0 or 16."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and minima, of six bits each, of a block's eight groups."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), 1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _k_nibbles(packed: Tensor) -> Tensor:
    """Returns the low four bits of each 32 bytes, followed by their high four bits."""
    parts = packed.view(len(packed), -1, GROUP)
    return torch.stack((parts & 15, parts >> 4), 2).flatten(1)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _k_nibbles(blocks[:, 16:].contiguous()), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    bits = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _k_nibbles(blocks[:, 48:].contiguous()) | (bits << 4).flatten(1)
    return codes, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, GROUP)
    codes = torch.stack((low & 15, low >> 4), 2).view(len(blocks), -1)
    codes |= torch.stack(((high & 3) << 4, (high & 12) << 2, high & 48, high >> 6 << 4), 2).view(len(blocks), -1)
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return codes, scales, None


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(0, 32, 18, formats.FOUR, _q4_0),
    "Q4_1": BlockFormat(1, 32, 20, formats.FOUR_MIN, _q4_1),
    "Q5_0": BlockFormat(2, 32, 22, formats.FIVE, _q5_0),
    "Q5_1": BlockFormat(3, 32, 24, formats.FIVE_MIN, _q5_1),
    "Q8_0": BlockFormat(4, 32, 34, formats.EIGHT, _q8_0),
    "Q4_K": BlockFormat(5, 256, 144, formats.FOUR_MIN, _q4_k),
    "Q5_K": BlockFormat(6, 256, 176, formats.FIVE_MIN, _q5_k),
    "Q6_K": BlockFormat(7, 256, 210, formats.SIX_HALVES, _q6_k),
}
