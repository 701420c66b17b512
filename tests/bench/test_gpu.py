"""The script for GPUs refuses by name where there is none; its page names its checks."""

import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import CHECKS, Bench, answers, main, save_model, speed
from tests import markdown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_the_page_explains_every_check() -> None:
    rows = markdown.table("docs/gpu.md", "On GPUs")
    assert [name.strip("`") for name, _ in rows] == list(CHECKS)


def test_rows_that_have_no_room_are_measured_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU: the engine and the measuring are the same."""
    save_model(tmp_path, hidden=64, layers=2)
    bench = Bench(tmp_path, layers=2, seconds=0.1, gpu="cpu")
    with bench.engine(device_map="cpu", dtype="float32", max_num_seqs=2, fast_path="off", threads=1) as engine:
        assert asyncio.run(speed(engine, 4, bench.seconds, patience=0.2)) > 0
        assert [len(tokens) for tokens in asyncio.run(answers(engine, rows=2, tokens=3))] == [3, 3]
    assert "only 2 of 4 rows run at the same time" in capsys.readouterr().out
