"""The script for GPUs refuses by name where there is none; its page names its checks."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import CHECKS, Bench, answers, save_model, speed
from tests import markdown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, cwd=markdown.ROOT)
    assert done.returncode == 2 and "no CUDA device here" in done.stderr


def test_the_page_explains_every_check() -> None:
    rows = markdown.table("docs/gpu.md", "On GPUs")
    assert [name.strip("`") for name, _ in rows] == list(CHECKS)


def test_rows_that_have_no_room_are_measured_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU: the engine and the measuring are the same."""
    monkeypatch.setattr(gpu, "PATIENCE", 0.2)
    save_model(tmp_path, hidden=64, layers=2)
    bench = Bench(tmp_path, layers=2, seconds=0.1, gpu="cpu")
    with bench.engine(device_map="cpu", dtype="float32", max_num_seqs=2, fast_path="off", threads=1) as engine:
        assert asyncio.run(speed(engine, 4, bench.seconds)) > 0
        assert [len(tokens) for tokens in asyncio.run(answers(engine, rows=2, tokens=3))] == [3, 3]
    assert "only 2 of 4 rows run at the same time" in capsys.readouterr().out
