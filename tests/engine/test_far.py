"""The check at load finds errors beyond a length that the config names, and costs nothing if it names none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, PagedAttention
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.config_fields import named_lengths
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from tests.engine.tiny import check_forward
from tests.engine.tiny_models import tiny_model

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
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_sound_model_passes(family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    with torch.inference_mode():
        assert check_batching(tiny_model(family, **changes).to(dtype)).problem is None


class Changed(GatheredAttention):
    """An attention that changes the options of each call."""

    def __init__(self, change: Callable[[AttentionOptions], AttentionOptions]) -> None:
        super().__init__()
        self._change = change

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        return super().__call__(query, layer, batch, self._change(options))


def attending(off: int) -> PagedAttention:
    """Returns an attention whose window or chunk is off by ``off`` tokens."""

    def change(options: AttentionOptions) -> AttentionOptions:
        if options.window is not None:
            options = replace(options, window=options.window + off)
        return options if options.chunk is None else replace(options, chunk=options.chunk + off)

    return Changed(change)


FAR_CHUNK = {"attention_chunk_size": LENGTH, "floor_scale": 64}


@pytest.mark.parametrize(("family", "changes"), [("mistral", WINDOW), ("llama4_text", FAR_CHUNK)])
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, pytest.param(256, marks=pytest.mark.long)])
def test_a_far_window_or_chunk_that_is_off_by_one_is_found_out(
    family: str, changes: dict[str, Any], off: int, dtype: torch.dtype, page_size: int
) -> None:
    model = tiny_model(family, **changes).to(dtype)
    with torch.inference_mode():
        expected = ExpectedLogits(model)
        wrong, right = (ModelForward(model, attention=attending(by)) for by in (off, 0))
        problem = check_forward(model, wrong, expected=expected, page_size=page_size)
        assert problem is not None and re.search(f"at position ({LENGTH - 1}|{LENGTH}|{LENGTH + 2})$", problem)
        assert check_forward(model, right, expected=expected, page_size=page_size) is None


class Narrow(NativeForward):
    """Kernels whose window is one token too narrow."""

    off = -1

    def _point_at(self, cache: PagedCache) -> None:
        super()._point_at(cache)
        for entry in self._pages:
            entry.window += self.off


class Wide(Narrow):
    off = 1


@pytest.mark.parametrize("forward_class", [Narrow, Wide])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_with_a_far_window_that_is_off_by_one_are_found_out(
    forward_class: type[NativeForward], dtype: torch.dtype, folder: Path
) -> None:
    model = tiny_model("mistral", **WINDOW).to(dtype)
    with torch.inference_mode():
        problem = check_forward(model, forward_class(model, KernelOptions(1, folder)))
        assert problem is not None and re.search(f"at position ({LENGTH - 1}|{LENGTH}|{LENGTH + 2})$", problem)
        assert check_forward(model, NativeForward(model, KernelOptions(1, folder))) is None


def test_a_mistake_after_many_keys_is_found_out_where_no_length_is_named() -> None:
    """Such a mistake could come from a kernel that works in blocks of 256 keys."""
    model, narrow = tiny_model(max_position_embeddings=512), Changed(lambda options: replace(options, window=256))
    with torch.inference_mode():
        problem = check_forward(model, ModelForward(model, attention=narrow))
    assert problem is not None and re.search(r"at position 2(57|58|60)$", problem)


class Scaled(ModelForward):
    """A forward that changes the new tokens of all sequences if one of them is longer than the length."""

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        if max(each.length for each in batch.sequences) > LENGTH:
            far = tuple(replace(each, token_ids=[token ^ 1 for token in each.token_ids]) for each in batch.sequences)
            batch = replace(batch, sequences=far)
        return super().__call__(batch, cache)


def test_a_forward_that_goes_wrong_beyond_a_length_is_found_out() -> None:
    model = tiny_model(**LLAMA_3)
    with torch.inference_mode():
        problem = check_forward(model, Scaled(model))
    assert problem is not None and f"at position {LENGTH}" in problem


def test_a_row_that_a_far_one_disturbs_is_found_out() -> None:
    """Some models scale the positions of all rows by the longest row."""
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


def calls_of(model: PreTrainedModel, check: Callable[[], object]) -> list[int]:
    """Returns the number of tokens in each call of the model."""
    calls: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: calls.append(args[0].numel()))
    with torch.inference_mode():
        check()
    hook.remove()
    return calls


def calls_of_the_check(model: PreTrainedModel, room: int | None = None) -> list[int]:
    found: list[str | None] = []
    calls = calls_of(model, lambda: found.append(check_batching(model, room).problem))
    assert found == [None]
    return calls


def test_a_length_costs_five_short_calls_and_none_where_none_is_named() -> None:
    """Two calls compute a short sequence and the tokens after it in transformers' cache; three are steps of ours."""
    plain, named = calls_of_the_check(tiny_model()), calls_of_the_check(tiny_model(**LLAMA_3))
    beyond = calls_of_the_check(tiny_model(**LLAMA_3, max_position_embeddings=LENGTH))
    assert len(named) == len(plain) + 5
    assert max(named[len(plain) :]) < 20
    assert len(beyond) == len(plain)


def test_a_second_forward_is_compared_with_logits_that_are_there_already() -> None:
    model = tiny_model(**LLAMA_3)
    expected = ExpectedLogits(model)
    problems: list[str | None] = []
    first = calls_of(model, lambda: problems.append(check_batching(model, expected=expected).problem))
    again = calls_of(model, lambda: problems.append(check_forward(model, ModelForward(model), expected=expected)))
    assert problems == [None, None]
    assert len(first) == 5 + 7 + 2 + 3 + 1, "five sequences alone, seven steps; a far cache, three steps; a moved step"
    assert len(again) == 7 + 3


def test_a_cache_that_is_large_beside_the_weights_is_not_compared_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(**LLAMA_3)
    with caplog.at_level(logging.INFO):
        calls = calls_of_the_check(model, room=LENGTH * 384)
    assert len(calls) == len(calls_of_the_check(tiny_model()))
    assert f"positions from {LENGTH} on" in caplog.text
    assert len(calls_of_the_check(model, room=2 * LENGTH * 384)) == len(calls) + 5


def test_a_layout_names_the_windows_of_its_layers() -> None:
    layout = CacheLayout(tiny_model("lfm2").config)
    assert layout.has_states and layout.windows == [None]
    assert CacheLayout(tiny_model("gemma3_text", **MIXED).config).windows == [LENGTH, None, LENGTH]
