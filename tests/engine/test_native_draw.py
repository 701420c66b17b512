"""The kernels draw the same tokens as torch, or leave a row to torch."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeDraw, NativeForward
from mlserver_torch_stream.engine.sampling import sampler
from mlserver_torch_stream.engine.sampling.candidates import UNDECIDED, draw
from mlserver_torch_stream.engine.sampling.row_sampler import LogitAdjuster, RowSampler
from mlserver_torch_stream.engine.sampling.sampler import SampledToken, sample
from mlserver_torch_stream.types import SamplingParameters
from tests.engine.page_book import PageBook
from tests.engine.tiny_models import tiny_model

WIDTH, VOCAB = 3008, 2999  # the kernels' rows are whole panels; the last columns are padding
SETTINGS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"temperature": 1e-3},
    {"top_k": 1},
    {"top_k": 50, "temperature": 1.7},
    {"top_k": 127},
    {"top_k": 128},
    {"top_k": 900},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
    {"top_p": 0.9, "min_p": 0.001},
]
# A float32 cannot tell these from 1 and 0, or holds no such temperature. Torch has the filters on.
BEYOND_FLOAT32: list[dict[str, float]] = [
    {"top_p": 1 - 1e-9},
    {"typical_p": 1 - 1e-9},
    {"min_p": 1e-46},
    {"temperature": 1e39},
]


@pytest.fixture(scope="module")
def results(folder: Path) -> Logits:
    """The logits of a step, whose forward is deleted before tokens are drawn from them."""
    model = tiny_model("llama")
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        book = PageBook(model)
        logits = forward(book.batch({"a": [1, 2, 3]}, 1), book.cache)
    del forward
    gc.collect()
    return logits


@pytest.fixture(scope="module")
def native(results: Logits) -> NativeDraw:
    assert isinstance(results.row_draw, NativeDraw)
    return results.row_draw


def row(seed: int, vocab_size: int = VOCAB, **params: Any) -> RowSampler:
    given = SamplingParameters(**{"temperature": 1.0, **params})
    adjuster = LogitAdjuster(given, prompt_ids=(1, 2, 3), vocab_size=vocab_size, end_ids=(2,))
    return RowSampler(given, adjuster, vocab_size, seed, 0)


def logits_like(kind: str, rows: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    logits *= {"flat": 0.5, "tied": 2.0, "masked": 3.0, "peaked": 4.0}[kind]
    if kind == "tied":
        logits = logits.round()
    if kind == "masked":
        logits[:, torch.arange(WIDTH) % 16 > 0] = -torch.inf
    logits[:, VOCAB:] = 1000.0
    return logits


@pytest.mark.parametrize("kind", ["flat", "tied", "masked", "peaked"])
def test_the_tokens_are_those_of_torch_for_every_seed(kind: str, native: NativeDraw) -> None:
    decided: list[int] = []
    rows = 48
    for number, setting in enumerate(SETTINGS + BEYOND_FLOAT32):
        logits = logits_like(kind, rows, number)
        samplers = [row(1000 * number + seed, **setting) for seed in range(rows)]
        order = list(range(rows))[::-1]
        drawn = native(logits, order, samplers)
        expected = draw(logits[order, :VOCAB], samplers)
        known = [pair for pair in zip(drawn, expected, strict=True) if pair[0] != UNDECIDED]
        assert all(token_id == same for token_id, same in known), setting
        decided.append(len(known))
    if kind == "peaked":
        assert min(decided[: len(SETTINGS)]) > 0.9 * rows, (
            "torch draws hardly any row of a model that is sure of its tokens"
        )


def mixed_rows(results: Logits) -> list[RowSampler]:
    vocab_size = results.tensor.shape[1]
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "logprobs": True, "top_logprobs": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"typical_p": 0.7},
        {"logit_bias": {4: 3.0, 8: -100.0}, "min_tokens": 2, "top_k": 20},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"min_p": 0.05},
    ]
    return [row(seed, vocab_size, **settings[seed % len(settings)]) for seed in range(64)]


def test_rows_of_all_kinds_get_the_tokens_that_torch_gives_them(results: Logits) -> None:
    """Greedy rows, rows with edited logits, rows with log-probabilities and rows that fail, in any order."""
    vocab_size = results.tensor.shape[1]
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    logits[5, 7], logits[9, 3] = torch.nan, torch.inf
    before, rows = logits.clone(), mixed_rows(results)
    for step in range(4):
        indices = [(7 * i + step) % 64 for i in range(64)]
        drawn = sample(logits, rows, indices, None, results.row_draw)
        expected = sample(logits, rows, indices)
        assert [getattr(choice, "token_id", str(choice)) for choice in drawn] == [
            getattr(choice, "token_id", str(choice)) for choice in expected
        ]
        for each, choice, same in zip(rows, drawn, expected, strict=True):
            assert getattr(choice, "logprob", None) == getattr(same, "logprob", None)
            if isinstance(choice, SampledToken):
                each.accept(choice.token_id)
        assert sum(isinstance(choice, SampledToken) for choice in drawn) == 62, "rows with a bad logit fail"
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_torch_reads_no_row_that_the_kernels_draw(results: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = sampler._sampled

    def counted(logits: torch.Tensor, rows: Any, indices: list[int], row_draw: Any) -> Any:
        read.extend(indices)
        return whole(logits, rows, indices, row_draw)

    monkeypatch.setattr(sampler, "_sampled", counted)
    vocab_size = results.tensor.shape[1]
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(5)) * 9
    rows = [row(1, vocab_size), row(2, vocab_size, logprobs=True), row(3, vocab_size, top_k=9)]
    sample(logits, rows, [0, 2, 3], None, results.row_draw)
    assert read == [2]


def test_no_row_is_drawn_twice_from_the_same_logits(results: Logits) -> None:
    """The kernels leave the row with typical-p to torch at once; an edited row is drawn only after it is edited."""
    asked: list[tuple[bool, list[int]]] = []
    vocab_size = results.tensor.shape[1]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(6))
    rows = [row(1, vocab_size, typical_p=0.7), row(2, vocab_size, presence_penalty=0.3), row(3, vocab_size)]

    def noted(from_logits: torch.Tensor, indices: Any, samplers: list[RowSampler]) -> list[int]:
        assert results.row_draw is not None
        asked.append((from_logits is logits, [rows.index(each) for each in samplers]))
        return results.row_draw(from_logits, indices, samplers)

    sample(logits, rows, None, None, noted)
    assert asked == [(True, [0, 2]), (False, [1])]
