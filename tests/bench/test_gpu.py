"""The scripts for GPUs refuse by name where there is none, run what a CPU can, and are explained by their page."""

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_engines
from benchmarks.gpu import CHECKS, Bench, main, run
from tests import markdown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_the_page_explains_every_check() -> None:
    rows = markdown.table("docs/gpu.md", "GPUs")
    assert [name.strip("`") for name, _ in rows] == list(CHECKS)


def test_what_needs_no_gpu_runs_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry", "--checks", "steps", "prefill", "sampling", "engines"]) == 0
    said = capsys.readouterr().out
    for part in ("3 streams:", "four prompts beside", "drawn, penalties", "needs a GPU"):
        assert part in said


def test_a_check_that_breaks_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> None:
        raise RuntimeError("no kernel")

    ran: list[Bench] = []
    monkeypatch.setitem(CHECKS, "logits", broken)
    monkeypatch.setitem(CHECKS, "steps", ran.append)
    bench = Bench(torch.device("cpu"))
    assert run(bench, ["logits", "steps"]) == 1
    assert bench.wrong == ["logits: RuntimeError: no kernel"] and ran == [bench]


@pytest.mark.parametrize(
    ("check", "what"), [("several", "a map over several GPUs"), ("ranks", "a split model's ranks")]
)
def test_what_needs_two_gpus_is_skipped_by_name(capsys: pytest.CaptureFixture[str], check: str, what: str) -> None:
    bench = gpu_engines.Bench(Path(), layers=2, seconds=0.0, gpus=1)
    gpu_engines.CHECKS[check](bench)
    assert f"skipped: {what}: needs two GPUs, here is 1" in capsys.readouterr().out
    assert not bench.wrong
