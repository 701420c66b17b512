"""A config alone predicts the loaded model's size and costs, and which requests the engine accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mlserver_torch_stream.engine.cache.page_counts import size_cache
from mlserver_torch_stream.engine.capacity import KNOWN, DeviceSpec, ModelSize, find_device, make_plan, read_size
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.scheduler.queue import SchedulerLimits, fits_alone
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.model_source import ModelSource
from tests.engine.tiny_models import tiny_model as make

GIB = 2**30


def size_of(model: Any, folder: Path, dtype: str = "float32") -> ModelSize:
    model.config.save_pretrained(folder)
    return read_size(ModelSource("folder", str(folder)), dtype)


def written(folder: Path, kind: str, **options: Any) -> ModelSource:
    config = AutoConfig.for_model(kind, **options)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return ModelSource("folder", str(folder))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelSize:
    """The size of a Llama of 70 billion parameters, which would not fit into this machine's memory."""
    return read_size(
        written(
            tmp_path_factory.mktemp("large"),
            "llama",
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4_text", "qwen3", "phi3", "lfm2", "mamba2"])
def test_the_config_alone_says_what_the_loaded_model_is(family: str, tmp_path: Path) -> None:
    model = make(family)
    with torch.inference_mode():
        found = check_batching(model).spec
    size = size_of(model, tmp_path)
    assert size.spec == found
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.weight_bytes == 4 * size.parameters


@pytest.mark.long
def test_a_large_models_numbers_are_those_of_its_card(large: ModelSize) -> None:
    assert large.parameters == 70_553_706_496
    assert large.spec.token_bytes == 2 * 80 * 8 * 128 * 2
    assert large.ranks == (1, 2, 4, 8)
    assert large.max_model_len == 131072


@pytest.mark.parametrize("family", ["mixtral", "gemma4_moe"])
def test_a_step_of_more_rows_reads_more_of_the_experts_and_no_untied_embedding(family: str, tmp_path: Path) -> None:
    size = size_of(make(family), tmp_path, "bfloat16")
    assert 0 < size.experts < size.parameters and size.expert_share == 0.5
    dense = size.parameters - size.experts - size.unread
    assert size.unread == (259 * 32 if family == "mixtral" else 0)  # Gemma ties its embedding
    assert size.read_per_step(1) == 2 * (dense + size.experts / 2)
    assert size.read_per_step(2) == 2 * (dense + size.experts * 3 / 4)
    assert size.read_per_step(1000) == pytest.approx(2 * (dense + size.experts))
    assert size.active == dense + size.experts / 2


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_streams_are_what_the_engines_account_lets_in(family: str, tmp_path: Path) -> None:
    size = size_of(make(family), tmp_path)
    plan = make_plan(size, DeviceSpec("", 2**23, 1e9, None, ""), 1, 200, 0.8)
    assert plan.fits

    def refused(sequences: int) -> bool:
        held = size_cache([(size.spec, plan.cache)], sequences=sequences, tokens=200, step=64)
        limits = SchedulerLimits(sequences, 1, held.pages, plan.cache)  # all of them decode
        return not fits_alone(size.spec, limits, sequences, 0, 200)

    assert not refused(plan.streams)
    assert refused(plan.streams + 1)


def test_a_stream_takes_its_pages_and_nothing_is_reserved(large: ModelSize) -> None:
    host = DeviceSpec("", 600 * 10**9, 1e11, None, "")
    plan = make_plan(large, host, 1, 4096, 0.55)
    assert plan.streams == plan.cache // (4096 * large.spec.token_bytes)


def test_more_devices_hold_more_and_are_faster(large: ModelSize) -> None:
    plans = [make_plan(large, KNOWN["h100"], ranks, 4096, 0.8) for ranks in large.ranks]
    assert [plan.fits for plan in plans] == [False, True, True, True]
    assert plans[1].streams < plans[2].streams < plans[3].streams
    assert plans[2].alone == pytest.approx(2 * plans[1].alone)
    assert plans[1].weights == large.weight_bytes // 2


def test_speeds_are_bandwidth_alone_and_arithmetic_together(large: ModelSize) -> None:
    device = DeviceSpec("", 10_000 * 10**9, 1e12, 1e15, "")
    plan = make_plan(large, device, 1, 1000, 0.8)
    row = 1000 * large.spec.token_bytes
    assert plan.alone == pytest.approx(1e12 / (large.read_per_step(1) + row))
    assert plan.prompts == pytest.approx(1e15 / (2 * large.active))
    slow = make_plan(large, DeviceSpec("", 10_000 * 10**9, 1e12, 1e12, ""), 1, 1000, 0.8)
    assert slow.together == pytest.approx(1e12 / (2 * large.active))


def test_a_device_by_its_name() -> None:
    assert find_device("H100") is KNOWN["h100"]
    with pytest.raises(SettingsError, match=r"did you mean a100-80gb\?"):
        find_device("a100-80g")
    with pytest.raises(SettingsError, match="known: l4, a10"):
        find_device("abacus")


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="cannot read the config of nothing"):
        read_size(ModelSource("folder", str(tmp_path / "nothing")))
