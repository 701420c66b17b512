"""Weights take the smallest share of the GPUs' memory that holds them without moving weights at every step."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.loading.loader import _placement, weight_bytes, weight_share
from mlserver_torch_stream.engine_settings import EngineSettings
from tests.engine.tiny_models import tiny_model

GB = 10**9


@pytest.mark.parametrize(
    ("weights", "free", "share"),
    [
        (16, [80], 0.7),
        (56, [80], 0.7),
        (65, [80], 0.9),  # a 32B in 16 bits on one GPU of 80 GB
        (140, [80], 0.9),  # what is left goes to the CPU
        (100, [80, 80], 0.7),
        (140, [80, 80], 0.9),
        (111, [80, 80], 0.9),  # 112 of 160 are 0.7 of them, but no layer is cut
    ],
)
def test_the_smallest_share_that_holds_the_weights_is_taken(weights: int, free: list[int], share: float) -> None:
    assert weight_share(weights * GB, [room * GB for room in free]) == share


def test_the_log_says_which_share_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    weight_share(65 * GB, [80 * GB])
    assert "90 %" in caplog.text and "every step" not in caplog.text
    weight_share(140 * GB, [80 * GB])
    assert "the rest stays on the CPU, and every step copies it to a GPU" in caplog.text
    caplog.clear()
    assert weight_share(None, [80 * GB]) == 0.7 and "70 %" in caplog.text


@pytest.mark.parametrize(("dtype", "element"), [("auto", 2), ("float32", 4)])
def test_the_files_tell_the_bytes_of_the_weights(tmp_path: Path, dtype: str, element: int) -> None:
    model = tiny_model().bfloat16()
    model.save_pretrained(tmp_path)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert weight_bytes(str(tmp_path), None, dtype) == element * count
    (tmp_path / "model.safetensors").unlink()
    assert weight_bytes(str(tmp_path), None, dtype) == element * count, "by the config"
    (tmp_path / "config.json").write_text("{}")
    assert weight_bytes(str(tmp_path), None, dtype) is None


def test_a_quantised_checkpoint_is_as_large_as_its_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(10, 10, dtype=torch.int8), "b": torch.zeros(10)}, tmp_path / "model.safetensors")
    assert weight_bytes(str(tmp_path), None, "bfloat16") == 100 + 20


def test_the_default_map_gives_each_gpu_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (80 * GB, 80 * GB))
    settings = EngineSettings()
    assert _placement(settings, lambda: 65 * GB)["max_memory"][0] == 72 * GB
    assert _placement(settings, lambda: 30 * GB)["max_memory"][0] == 56 * GB
