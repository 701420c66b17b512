"""The result's shape, its tables, and a whole quick run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, chart, report
from benchmarks.sweep import Measured


def _measured(name: str, rate: float, ttft: float) -> dict[str, Any]:
    measured = Measured(name, {"torch": "1"}, starts_s=[2.0], idle_rss_mib=[100.0])
    for factor in (1.0, 2.0):
        figures = {"tokens_per_s": rate * factor, "ttft_p50_ms": ttft * factor, "itl_p99_ms": 5.0, "rss_mib": 300.0}
        measured.add("rest", "c1", {**figures, "cpu_s": 1.0, "client_cpu_s": 0.1})
    return measured.as_json()


ROOFLINE = {
    "limits": {"read": 1e9, "peaks": {"matrix": 0, "bf16": 1e9, "fp32": 5e8, "int8": 0}},
    "model": {"projections": 4_000_000, "head": 0, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 0,
              "weight_bytes": 8_000_000},
    "unit": "bf16",
}  # fmt: skip


@pytest.fixture
def result() -> dict[str, Any]:
    machine = {"date": "2026-01-01T00:00:00+00:00", "cpu": "some CPU", "cores": 2, "load_before": 0.1}
    servers = [_measured("ours", 100.0, 10.0), _measured("theirs", 50.0, 40.0)]
    servers[1]["failures"] = {"c4": "answers one request at a time"}
    missing = {"gone": "no wheels"}
    return {"machine": machine, "model": "m", "sweeps": 2, "servers": servers, "not_installed": missing}


def test_ratios_are_of_the_best_runs(result: dict[str, Any]) -> None:
    rows = report.ratio_table(result)
    assert rows[0][2:] == ["ours", "theirs"]
    assert [row[3] for row in rows[1:]] == ["2.00 (100)", "0.25 (40.0)", "1.00 (5.0)"]


def test_a_case_has_its_share_of_the_limit_where_the_limit_is_known(result: dict[str, Any]) -> None:
    for run in result["servers"][0]["cases"]["rest"]["c1"].values():
        if isinstance(run, dict):
            run["steady_tokens_per_s"] = 62.5  # a step of 16 ms, where memory allows 8
    assert report.case_table(result["servers"][0], "rest", result)[1][8] == "-"
    result |= {"roofline": ROOFLINE, "scale": {"prompt_tokens": 128, "new_tokens": 128}}
    assert report.case_table(result["servers"][0], "rest", result)[1][8] == "0.50"
    assert "memory 1.0 GB/s; GFLOP/s of its units: bf16 1, fp32 0" in report.as_text(result)


def test_what_is_missing_is_named_with_its_reason(result: dict[str, Any]) -> None:
    text = report.as_text(result)
    assert "gone: not installed: no wheels" in text
    assert "theirs, c4: answers one request at a time" in text


def test_text_markdown_and_json_say_the_same(result: dict[str, Any], tmp_path: Path) -> None:
    report.write(result, tmp_path, "peers", "Beside others")
    assert json.loads((tmp_path / "peers.json").read_text()) == result
    markdown = (tmp_path / "peers.md").read_text()
    assert markdown.startswith("# Beside others\n")
    assert "| c1 | 200 (150) | 10.0 |" in markdown
    assert "200 (150)" in report.as_text(result)


def test_a_chart_is_drawn_of_what_is_there(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result["servers"][1]["cases"] = {}
    chart.draw(result, tmp_path / "docs" / "chart.png")
    assert (tmp_path / "docs" / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--cases", "nonsense"], ["--parts", "all,x"], ["--endpoints", "telnet"]])
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(arguments)


def test_only_a_whole_run_is_kept_as_the_projects_result() -> None:
    assert bench.parse([]).output == bench.RESULTS
    for arguments in (["--quick"], ["--cases", "c1"], ["--new-tokens", "3"], ["--parts", "growth"]):
        assert bench.parse(arguments).output is None


@pytest.mark.slow
def test_a_quick_run_from_end_to_end(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--uri", str(tiny_model), "--parts", "all", "--output", str(tmp_path)]
    assert bench.main(options) == 0
    printed = capfd.readouterr().out
    assert "at once" in printed
    kept = json.loads((tmp_path / "bench.json").read_text())
    (server,) = kept["servers"]
    assert set(server["cases"]) == {"rest", "grpc"}
    for by_case in server["cases"].values():
        assert set(by_case) == {"c1", "c4", "p200"}
        assert by_case["c4"]["best"]["new_tokens"] == 4 * 8
    assert server["failures"] == {}
    assert kept["gains"]["health_p99_ms"] > 0
    assert kept["growth"]["memory"]["waiting"] == 16
    assert [point["chunked_prefill_size"] for point in kept["chunks"]] == [64, 256]
    assert (tmp_path / "bench.md").is_file()
