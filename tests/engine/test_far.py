"""The check at load sees what goes wrong beyond a length that the config names, and costs nothing where none is."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.loading.config_fields import named_lengths
from mlserver_torch_stream.engine.loading.selfcheck import check_batching, check_forward
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.verify_native import take_fast_path
from tests.engine.tiny import tiny_model, watched

LENGTH = 90
LLAMA_3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    }
}
WINDOW = {"sliding_window": LENGTH}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("family", "changes", "lengths"),
    [
        ("llama", {}, set()),
        ("llama", LLAMA_3, {LENGTH}),
        ("mistral", WINDOW, {LENGTH}),
        ("qwen2", WINDOW, set()),
        ("llama4_text", {"attention_chunk_size": 64, "floor_scale": 32}, {32, 64}),
        ("phi3", {"original_max_position_embeddings": LENGTH}, {LENGTH}),
        ("gpt2", {}, set()),
    ],
)
def test_the_lengths_that_a_config_names(family: str, changes: dict[str, Any], lengths: set[int]) -> None:
    assert named_lengths(tiny_model(family, **{"sliding_window": None, **changes}).config) == lengths


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", LLAMA_3),
        ("mistral", WINDOW),
        ("gemma3_text", MIXED),
        ("gpt_oss", MIXED),
        ("cohere2", MIXED),
        ("llama4_text", {"attention_chunk_size": LENGTH, "floor_scale": 64}),
        ("qwen3_next", LLAMA_3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_model_passes(family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    with torch.inference_mode():
        assert check_batching(tiny_model(family, **changes).to(dtype)).problem is None


class Narrow(NativeForward):
    """Kernels whose window is off by some columns."""

    off = -1

    def _point_at(self, caches: Any, queries: int) -> None:
        super()._point_at(caches, queries)
        for slab in self._slabs:
            slab.window += self.off


class Wide(Narrow):
    off = 1


@pytest.mark.parametrize("forward_class", [Narrow, Wide])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_far_window_that_is_off_by_one_is_found_out(
    forward_class: type[NativeForward], dtype: torch.dtype, folder: Path
) -> None:
    model = tiny_model("mistral", **WINDOW).to(dtype)
    with torch.inference_mode():
        problem = check_forward(model, forward_class(model, 1, folder))
        assert problem is not None and re.search(f"at position ({LENGTH - 1}|{LENGTH})$", problem)
        assert check_forward(model, NativeForward(model, 1, folder)) is None


def test_a_window_that_the_cache_does_not_know_of_is_found_out(folder: Path) -> None:
    """transformers' cache goes by ``layer_types``, which a checkpoint may have although its class declares none."""
    model = tiny_model("mistral", **WINDOW, layer_types=["full_attention"] * 3)
    with torch.inference_mode():
        assert str(take_fast_path(model, 1, folder)).endswith(f"at position {LENGTH}")


class Scaled(ModelForward):
    """A forward that moves the newest position of all rows when one of them is beyond the length."""

    def __call__(self, tokens: Any, cache: RowCache) -> torch.Tensor:
        lengths = cache.lengths
        if max(lengths) >= LENGTH:
            cache.lengths = [length + 1 for length in lengths]
        try:
            return super().__call__(tokens, cache)
        finally:
            if max(lengths) >= LENGTH:
                cache.lengths = [length + len(tokens[0]) for length in lengths]


def test_a_forward_that_goes_wrong_beyond_a_length_is_found_out() -> None:
    model = tiny_model(**LLAMA_3)
    with torch.inference_mode():
        problem = check_forward(model, Scaled(model))
    assert problem is not None and f"at position {LENGTH}" in problem


def test_a_row_that_a_far_one_disturbs_is_found_out() -> None:
    """Some models scale the positions of all rows by the longest."""
    model = tiny_model(**LLAMA_3)

    def shift_the_others(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is not None and positions.max() >= LENGTH:
            kwargs["position_ids"] = torch.where(positions >= LENGTH, positions, positions + 2)
        return args, kwargs

    model.register_forward_pre_hook(shift_the_others, with_kwargs=True)
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem is not None and f"at position {LENGTH}" in findings.problem


def calls_of_the_check(model: PreTrainedModel) -> list[list[list[int]]]:
    with torch.inference_mode(), watched(model) as watch:
        assert check_batching(model).problem is None
    return watch.calls


def test_a_length_costs_five_short_calls_and_none_where_none_is_named() -> None:
    plain, named = calls_of_the_check(tiny_model()), calls_of_the_check(tiny_model(**LLAMA_3))
    beyond = calls_of_the_check(tiny_model(**LLAMA_3, max_position_embeddings=LENGTH))
    assert len(named) == len(plain) + 5
    assert max(len(call[0]) for call in named) < 20
    assert len(beyond) == len(plain)


def test_a_cache_that_is_large_beside_the_weights_is_not_compared_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(**LLAMA_3)
    with torch.inference_mode(), caplog.at_level(logging.INFO), watched(model) as watch:
        assert check_batching(model, room=100_000).problem is None
    assert len(watch.calls) == len(calls_of_the_check(tiny_model()))
    assert f"positions from {LENGTH} on" in caplog.text


def test_a_layout_names_the_windows_of_its_layers() -> None:
    layout = CacheLayout(tiny_model("lfm2").config)
    assert layout.has_states and layout.windows == [None]
    assert CacheLayout(tiny_model("gemma3_text", **MIXED).config).windows == [LENGTH, None, LENGTH]
