"""Weights as integers in groups: each GGUF format equals gguf's own numbers, with any number of rows and of columns."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.native import groups as formats
from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native import weights
from mlserver_torch_stream.engine.native.groups import GROUP, PANEL, GroupFormat, Groups, pack_groups
from mlserver_torch_stream.engine.native.kernel_library import VARIABLE, open_kernels
from mlserver_torch_stream.engine.native.kernel_variants import runnable
from mlserver_torch_stream.engine.native.packed_rows import BLOCK_FORMATS, PackedLinear, PackedRows, unpack
from mlserver_torch_stream.engine.native.quantise import ROUNDED, quantise
from mlserver_torch_stream.engine.native.weights import DenseMatrix, GroupedMatrix, Packer, grouped_matrices

_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # else (0,)
ROWS = [1, 2, 3, 5, 6, 7, 12, 17, 40]
INT8 = ROUNDED["int8"].layers
INT4 = ROUNDED["int4"].layers


@pytest.fixture(scope="module")
def kernels(folder: Path) -> ctypes.CDLL:
    return open_kernels(folder, c.open_library)[0]


def random_blocks(kind: str, outputs: int, inputs: int = 512) -> PackedRows:
    """Returns random codes of the format, with scales of both signs."""
    of, random = BLOCK_FORMATS[kind], np.random.default_rng(len(kind) + outputs)
    blocks = random.integers(0, 256, (outputs * inputs // of.weights, of.bytes), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        halves = (0.01 * random.standard_normal((len(blocks), 1))).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return PackedRows(kind, torch.from_numpy(blocks.reshape(outputs, -1)))


def by_gguf(rows: PackedRows) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[rows.kind]
    return torch.from_numpy(gguf.dequantize(rows.data.numpy(), kind).astype(np.float32))


def products(kernels: ctypes.CDLL, matrix: GroupedMatrix, a: torch.Tensor, threads: int = 2) -> torch.Tensor:
    return products_of_runs(kernels, [matrix], a, threads)


def products_of_runs(
    kernels: ctypes.CDLL, matrices: list[GroupedMatrix], a: torch.Tensor, threads: int = 2
) -> torch.Tensor:
    outputs = sum(len(matrix.order) for matrix in matrices)
    panels = [torch.zeros(matrix.bytes, dtype=torch.uint8) for matrix in matrices]
    for matrix, to in zip(matrices, panels, strict=True):
        matrix.pack(to, Packer(kernels, threads))
    runs = [
        c.KernelRun(to.data_ptr(), len(matrix.order), matrix.number)
        for matrix, to in zip(matrices, panels, strict=True)
    ]
    given = c.KernelMatrix.of(a.shape[1], *runs)
    out = torch.full((len(a), outputs), float("nan"))
    multiply(kernels, given, a, out, threads)
    return out


def multiply(
    kernels: ctypes.CDLL, matrix: c.KernelMatrix, a: torch.Tensor, out: torch.Tensor, threads: int = 1
) -> None:
    given = ctypes.byref(matrix), a.data_ptr(), len(a), out.data_ptr(), False
    assert kernels.native_multiply(*given, c.torch_pool(), threads) == 0


def check_products(kernels: ctypes.CDLL, matrix: GroupedMatrix, dense: torch.Tensor) -> None:
    """Multiplied by unit vectors, products are the weights up to float16 scales; many rows are slightly rounded."""
    weights = products(kernels, matrix, torch.eye(dense.shape[1])).t()[: len(dense)]
    assert (weights - dense).abs().max() <= 1e-3 * dense.abs().max()
    a = torch.randn(max(ROWS), dense.shape[1], generator=torch.Generator().manual_seed(2))
    got, expected = products(kernels, matrix, a)[:, : len(dense)], a @ dense.t()
    assert (got - expected).pow(2).mean().sqrt() <= 0.01 * expected.std()


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_blocks_are_read_as_gguf_reads_them(kind: str) -> None:
    rows = random_blocks(kind, 9)
    assert torch.equal(rows.groups(slice(None)).dense(), by_gguf(rows))
    assert torch.equal(rows.groups(torch.tensor([4, 2])).dense(), by_gguf(rows)[[4, 2]])


@pytest.mark.parametrize("outputs", [1, 33, 70])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_products_are_those_of_gguf_s_weights(kind: str, outputs: int, kernels: ctypes.CDLL) -> None:
    rows = random_blocks(kind, outputs)
    check_products(kernels, GroupedMatrix([rows], INT8), by_gguf(rows))


@pytest.mark.parametrize("first", BLOCK_FORMATS)
@pytest.mark.parametrize("second", ["Q4_0", "Q5_1", "Q6_K", "dense"])
def test_parts_of_different_formats_share_a_matrix(first: str, second: str, kernels: ctypes.CDLL) -> None:
    one = random_blocks(first, 40)
    other = torch.randn(24, 512) if second == "dense" else random_blocks(second, 24)
    dense = quantise(other, INT8).dense() if isinstance(other, torch.Tensor) else by_gguf(other)
    check_products(kernels, GroupedMatrix([one, other], INT8), torch.cat((by_gguf(one), dense)))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "dense", "Q5_K"), ("Q4_0", "Q8_0", "Q4_0")])
def test_each_part_of_whole_panels_keeps_its_format(kinds: tuple[str, ...], kernels: ctypes.CDLL) -> None:
    parts = [
        torch.randn(outputs, 512) if kind == "dense" else random_blocks(kind, outputs)
        for kind, outputs in zip(kinds, (64, 32, 40), strict=True)
    ]
    runs = grouped_matrices(parts, INT8)
    own = [part.format if isinstance(part, PackedRows) else INT8 for part in parts]
    assert [run.format for run in runs] == own
    a = torch.randn(7, 512, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([products(kernels, GroupedMatrix([part], INT8), a) for part in parts], 1)
    assert torch.equal(products_of_runs(kernels, runs, a), alone)


def test_parts_of_one_format_or_in_one_panel_are_one_run() -> None:
    assert len(grouped_matrices([random_blocks("Q4_0", 32)] * 3, INT8)) == 1
    assert len(grouped_matrices([random_blocks("Q4_0", 40), random_blocks("Q8_0", 32)], INT8)) == 1
    assert len(grouped_matrices([random_blocks("Q4_0", 32), random_blocks("Q8_0", 32)], INT8, interleaved=True)) == 1


@pytest.mark.parametrize("outputs", [16, 40])
def test_gates_and_ups_lie_in_turn(outputs: int, kernels: ctypes.CDLL) -> None:
    gates, ups = random_blocks("Q4_1", outputs), random_blocks("Q8_0", outputs)
    got = products(kernels, GroupedMatrix([gates, ups], INT8, interleaved=True), torch.eye(512)).t()
    halves = got.view(-1, 2, 16, 512)
    for part, rows in enumerate((gates, ups)):
        found = halves[:, part].reshape(-1, 512)[:outputs]
        assert torch.allclose(found, by_gguf(rows), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("inputs", [2, 30, 32, 60, 576])
@pytest.mark.parametrize("format", [INT8, INT4, formats.FIVE_MIN, formats.SIX_HALVES, formats.EIGHT_MIN_HALVES])
def test_a_row_gets_the_same_bits_in_any_company(format: GroupFormat, inputs: int, kernels: ctypes.CDLL) -> None:
    weight = torch.randn(70, inputs, generator=torch.Generator().manual_seed(3))
    matrix = GroupedMatrix([weight], INT4 if 4 < format.bits < 8 else INT8 if format.scales == 2 else format)
    matrix.format = format
    a = torch.randn(max(ROWS), inputs, generator=torch.Generator().manual_seed(4))
    whole = products(kernels, matrix, a)
    for rows in ROWS:
        assert torch.equal(products(kernels, matrix, a[:rows].contiguous(), threads=1 + rows % 3), whole[:rows])
        last = a[-rows:].contiguous()
        assert torch.equal(products(kernels, matrix, last), whole[-rows:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_activation_that_is_no_number_does_not_get_lost(value: float, kernels: ctypes.CDLL) -> None:
    a = torch.ones(3, 64)
    a[1, 40] = value
    got = products(kernels, GroupedMatrix([torch.randn(32, 64)], INT8), a)
    assert got[[0, 2]].isfinite().all() and not got[1].isfinite().any()


def test_extremes_of_codes_and_activations_do_not_overflow(kernels: ctypes.CDLL) -> None:
    """Codes and activations at their extremes give the largest sums of pairs, which must fit into 16 bits."""
    for format, code in product((INT8, INT4, formats.FIVE, formats.FIVE_MIN, formats.SIX_HALVES), (0, -1)):
        minima = torch.zeros(32, 4) if format.minimum else None
        codes = torch.full((32, 4 * GROUP), code % 2**format.bits, dtype=torch.uint8)
        groups = Groups(format, codes, torch.ones(32, 4 * format.scales), minima)
        panels = torch.zeros(4 * format.block_bytes, dtype=torch.uint8)
        pack_groups(groups, panels)
        for a in (torch.ones(1, 4 * GROUP), -torch.ones(1, 4 * GROUP)):
            given = c.KernelMatrix.of(4 * GROUP, c.KernelRun(panels.data_ptr(), 32, format.number))
            out = torch.empty(1, 32)
            multiply(kernels, given, a, out)
            assert torch.allclose(out, a @ groups.dense().t(), rtol=1e-5)


@pytest.mark.parametrize("factor", [1.05, -1.0])
def test_a_wrong_scale_is_found_as_the_weights_are_packed(
    factor: float, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(groups: Groups, to: torch.Tensor) -> None:
        scales = groups.scales.clone()
        scales[5] *= factor
        pack_groups(Groups(groups.format, groups.codes, scales, groups.minima), to)

    monkeypatch.setattr(weights, "pack_groups", wrong)
    with pytest.raises(UnsupportedLayout, match="read weights that differ"):
        products(kernels, GroupedMatrix([torch.randn(40, 512)], INT8), torch.eye(512))


def test_blocks_that_are_read_as_another_format_are_found_as_they_are_packed(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PackedRows("Q4_1", random_blocks("Q4_1", 40).data & 0xBF)  # any two bytes are a finite float16
    monkeypatch.setattr(PackedRows, "number", BLOCK_FORMATS["Q4_0"].number)
    with pytest.raises(UnsupportedLayout, match="read weights that differ"):
        products(kernels, GroupedMatrix([rows], INT8), torch.eye(512))


def test_blocks_whose_first_weight_alone_is_read_rightly_are_found_as_they_are_packed(kernels: ctypes.CDLL) -> None:
    class Turned(PackedRows):
        @property
        def addresses(self) -> torch.Tensor:
            blocks = self.data.view(-1, 34)  # a scale, and then 32 weights
            self.read = torch.cat((blocks[:, :3], blocks[:, 3:].roll(1, 1)), 1).view_as(self.data)
            return PackedRows(self.kind, self.read).addresses

    with pytest.raises(UnsupportedLayout, match="read weights that differ"):
        products(kernels, GroupedMatrix([Turned("Q8_0", random_blocks("Q8_0", 40).data)], INT8), torch.eye(512))


def test_linear_layers_keep_their_weights_in_float32_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [PackedLinear(random_blocks(kind, 40), torch.randn(40)) for kind in ("Q6_K", "Q4_0")]
    x, model = torch.randn(3, 512), torch.nn.ModuleList(layers)
    expected = [layer(x) for layer in layers]
    unpack(model, 40 * 512 * 4)
    monkeypatch.setattr(layers[0], "rows", None)  # a later conversion would fail
    assert all(torch.allclose(layer(x), out, atol=1e-4) for layer, out in zip(layers, expected, strict=True))
    monkeypatch.setattr(layers[1], "rows", None)
    with pytest.raises(AttributeError):
        layers[1](x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("other", ["Q4_0", "Q5_1", "Q6_K"])
def test_the_kernels_lay_blocks_out_as_torch_does(
    kind: str, other: str, interleaved: bool, kernels: ctypes.CDLL
) -> None:
    parts = [random_blocks(kind, 40), random_blocks(other, 40)]
    matrix = GroupedMatrix(parts, INT8, interleaved)
    panels = torch.zeros(matrix.bytes, dtype=torch.uint8)
    matrix.pack(panels, Packer(kernels, 2, compares=False))
    groups = [part.groups(slice(None)).as_format(matrix.format) for part in parts]
    codes = torch.cat([*(each.codes for each in groups), torch.full((1, 512), matrix.format.offset, dtype=torch.uint8)])
    scales = torch.cat([*(each.scales for each in groups), torch.zeros(1, groups[0].scales.shape[1])])
    minima = None
    if matrix.format.minimum:
        minima = (
            torch.cat([*(each.minima for each in groups), torch.zeros(1, 512 // GROUP)])[matrix.order] + 0.0
        )  # no negative zero
    expected = torch.zeros_like(panels)
    pack_groups(Groups(matrix.format, codes[matrix.order], scales[matrix.order], minima), expected)
    assert torch.equal(panels, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", [6, 64, 576])
@pytest.mark.parametrize("interleaved", [False, True], ids=["stacked", "interleaved"])
def test_dense_rows_lie_word_by_word_in_panels(
    dtype: torch.dtype, inputs: int, interleaved: bool, kernels: ctypes.CDLL
) -> None:
    parts = [torch.randn(outputs, inputs) for outputs in (40, 40)]  # no whole panels; float32, whatever the dtype
    parts[1] = torch.randn(inputs, 40).t()  # not contiguous
    matrix = DenseMatrix(parts, dtype, interleaved)
    panels = torch.full((matrix.bytes,), 255, dtype=torch.uint8)
    matrix.pack(panels, Packer(kernels, 2))
    rows = torch.cat(parts).to(dtype)[matrix.order]
    rows[matrix.order < 0] = 0
    words = rows.view(torch.int32).view(-1, PANEL, inputs * dtype.itemsize // 4)
    assert torch.equal(panels.view(torch.int32), words.transpose(1, 2).flatten())


def test_dense_parts_with_different_inputs_are_refused(kernels: ctypes.CDLL) -> None:
    matrix = DenseMatrix([torch.zeros(32, 8), torch.zeros(32, 6)], torch.float32, False)
    with pytest.raises(UnsupportedLayout, match="different numbers of inputs"):
        matrix.pack(torch.zeros(matrix.bytes, dtype=torch.uint8), Packer(kernels))


def test_weights_that_float16_scales_do_not_hold_are_refused(kernels: ctypes.CDLL) -> None:
    with pytest.raises(UnsupportedLayout, match="larger than float16"):
        products(kernels, GroupedMatrix([torch.full((4, 32), 1e9)], INT8), torch.eye(32))


@pytest.mark.slow
@pytest.mark.parametrize("name", [variant.name for variant in runnable()] or [""])
def test_other_cpus_get_the_same_integers(name: str, tmp_path: Path, folder: Path, monkeypatch: Any) -> None:
    """In each variant that this CPU runs, integers are exact; only sums of scaled ones may be rounded differently."""
    monkeypatch.setenv(VARIABLE, name)
    variant = open_kernels(folder, c.open_library, {VARIABLE: name})[0]
    for kind in BLOCK_FORMATS:
        rows = random_blocks(kind, 40)
        check_products(variant, GroupedMatrix([rows], INT8), by_gguf(rows))
    test_extremes_of_codes_and_activations_do_not_overflow(variant)
    for format in (INT8, INT4, formats.FIVE_MIN, formats.SIX_HALVES):
        test_a_row_gets_the_same_bits_in_any_company(format, 60, variant)


@pytest.mark.parametrize("value", [2e38, -3.4e38])
def test_a_large_activation_is_not_taken_for_an_infinite_one(value: float, kernels: ctypes.CDLL) -> None:
    a = torch.zeros(1, 64)
    a[0, 40] = value
    weight = 0.01 * torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    got = products(kernels, GroupedMatrix([weight], INT8), a)
    assert torch.allclose(got, a @ weight.t(), rtol=0.02, atol=0.02 * abs(value) * 0.01)
