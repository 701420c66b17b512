"""The lines of results: what is stored, how a stopped run continues, and the tables and pages made from them."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, report
from benchmarks.cases import QUICK, make_cases
from benchmarks.prompts import Prompts
from benchmarks.results import FOLDER, NO_FIT, START, Recorder, read_runs
from benchmarks.servers import Live, Ours, StartFailed
from benchmarks.sweep import Plan, run_sweeps

ROOFLINE = {
    "limits": {"read": 1e9, "peaks": {"matrix": 0, "bf16": 1e9, "fp32": 5e8, "int8": 0}},
    "model": {"projections": 4_000_000, "head": 0, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 0,
              "weight_bytes": 8_000_000},
    "unit": "bf16",
}  # fmt: skip


HEAD = {
    "run": "2026-01-01T00:00:00+00:00",
    "name": "peers-bf16",
    "commit": "abc",
    "machine": {"date": "2026-01-01T00:00:00+00:00", "cpu": "some CPU", "cores": 2, "load_before": 0.1},
    "model": "m",
    "sweeps": 2,
    "not_installed": {"gone": "no wheels"},
    "servers": {"ours": {"torch": "1"}, "theirs": {"torch": "2"}},
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    made = Recorder(tmp_path / "chip.jsonl", HEAD)
    for sweep, factor in enumerate((1.0, 2.0)):
        for name, rate, ttft in (("ours", 100.0, 10.0), ("theirs", 50.0, 40.0)):
            made.add((name, "", START, sweep), {"ready_s": 2.0, "idle_rss_mib": 100.0})
            figures = {"tokens_per_s": rate * factor, "ttft_p50_ms": ttft * factor, "itl_p99_ms": 5.0, "rss_mib": 300.0}
            made.add((name, "rest", "c1", sweep), {**figures, "cpu_s": 1.0, "client_cpu_s": 0.1})
    made.add(("theirs", "rest", "c4", 0), value=NO_FIT)
    return made


def _row(recorder: Recorder, label: str, **more: Any) -> list[str]:
    rows = report.comparison([recorder.run.as_result() | more], every=True)
    return next(row[1:] for row in rows if row[0] == label)


def test_ratios_are_of_the_best_runs(recorder: Recorder) -> None:
    assert _row(recorder, "tokens/s of the first column ÷ this")[0].startswith("1.00 / ")
    assert _row(recorder, "tokens/s of the first column ÷ this")[1] == "2.00 / does not fit"


def test_a_server_has_a_column_for_each_of_its_endpoints(recorder: Recorder) -> None:
    recorder.add(("ours", "grpc", "c1", 0), {"tokens_per_s": 150.0, "ttft_p50_ms": 20.0})
    assert _row(recorder, "") == ["ours 1, rest", "ours 1, grpc", "theirs 2"]
    assert [cell.split(" / ")[0] for cell in _row(recorder, "tokens/s, median")] == ["150", "150", "75"]


def test_tokens_of_a_handler_have_a_decimal(recorder: Recorder) -> None:
    assert _row(recorder, "tokens/s, median", name="peers-h1-stream") == ["150.0 / -", "75.0 / does not fit"]


def test_requests_have_a_row_of_their_own(recorder: Recorder) -> None:
    for sweep, rate in enumerate((1000.0, 3000.0, 2000.0)):
        recorder.add(("ours", "rest", "r20000", sweep), {"requests_per_s": rate})
    assert _row(recorder, "requests/s with bodies of 20000 bytes, median") == ["2,000", "-"]


def test_a_case_has_its_share_of_the_limit_where_the_limit_is_known(recorder: Recorder) -> None:
    recorder.add(("ours", "rest", "c1", 2), {"tokens_per_s": 1.0, "steady_tokens_per_s": 62.5, "rss_mib": 1.0})
    label = "share of the machine's limit"  # 16 ms, where memory allows 8
    scale = {"prompt_tokens": 128, "new_tokens": 128}
    assert _row(recorder, label, roofline=ROOFLINE, scale=scale)[0] == "0.50 / -"
    result = {**recorder.run.as_result(), "roofline": ROOFLINE, "scale": scale}
    assert "memory 1.0 GB/s; GFLOP/s of its units: bf16 1, fp32 0" in report.as_markdown(result)


def test_what_is_missing_is_named_with_its_reason_and_is_the_value_of_its_cell(recorder: Recorder) -> None:
    text = report.as_markdown(recorder.run.as_result())
    assert "gone: not installed: no wheels" in text and "theirs, c4: does not fit" in text
    rows = dict((row[0], row[2]) for row in report.comparison([recorder.run.as_result()])[1:])
    assert rows["tokens/s at 1 / 4 streams, best"] == "100 / does not fit"


def test_a_run_that_was_stopped_goes_on_and_another_begins_anew(recorder: Recorder) -> None:
    path, cell = recorder.path, ("ours", "rest", "c1", 1)
    path.write_text(path.read_text() + '{"run": "2026-01-01T00:0', encoding="utf-8")  # killed as it wrote
    later = {**HEAD, "run": "2026-01-02T00:00:00+00:00"}
    assert Recorder(path, later).has(cell) and len(read_runs(path)) == 1
    for other in ({**later, "commit": "abd"}, {**later, "model": "n"}):
        assert not Recorder(path, other).has(cell)
    assert not Recorder(path, {**later, "run": "2026-01-03T00:00:00+00:00"}, again=True).has(cell)
    path.write_text("nonsense\n" + path.read_text(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"chip\.jsonl:1: is not JSON"):
        read_runs(path)


def test_only_what_has_no_line_is_run_and_what_does_not_fit_is_not_started(tiny_model: Path, tmp_path: Path) -> None:
    started: list[str] = []

    class Refused(Ours):
        @contextmanager
        def start(self, folder: Path) -> Any:
            started.append(self.name)
            raise StartFailed("ended with -9: ")
            yield

    head = {**HEAD, "servers": {"ours": {}}}
    plan = Plan(make_cases(["c1", "p64"], QUICK, Prompts(tiny_model)), QUICK, Prompts(tiny_model), 1, lenient=True)
    recorder = Recorder(tmp_path / "chip.jsonl", head)
    for again in (False, False, True):
        run_sweeps({"ours": Refused(str(tiny_model))}, plan, Recorder(recorder.path, head, again))
        values = {line["value"] for line in read_runs(recorder.path)[-1].cells.values()}
        assert values == {NO_FIT}
    assert len(started) == 2, "the second time there is nothing left to run"
    too_large = Plan(plan.cases, QUICK, plan.prompts, 1, lenient=True, least_mib=1e12)
    run_sweeps({"ours": Refused(str(tiny_model))}, too_large, Recorder(recorder.path, head, again=True))
    assert len(started) == 2


class _Refused:
    name = "ours"

    def versions(self) -> dict[str, str]:
        return {}

    def start(self, folder: Path) -> AbstractContextManager[Live]:
        raise StartFailed("ended with -9: ")


def test_starts_are_measured_first_and_further_rounds_have_one_stream(tiny_model: Path, tmp_path: Path) -> None:
    prompts, looked = Prompts(tiny_model), iter(range(2))  # before the third start the weights stay in the page cache
    cases = make_cases(["c1", "c4"], QUICK, prompts)
    plan = Plan(cases, QUICK, prompts, 1, lenient=True, weights=lambda: [tiny_model][next(looked) :], alone_sweeps=2)
    recorder = Recorder(tmp_path / "chip.jsonl", {**HEAD, "servers": {"ours": {}}})
    run_sweeps({"ours": _Refused()}, plan, recorder)
    starts = [("ours", kind, START, 0) for kind in ("first", "later", "warm")]
    assert list(recorder.run.cells)[:3] == starts
    assert not list(looked)
    rest = [(case, sweep) for _, _, case, sweep in list(recorder.run.cells)[3:]]
    assert rest == [("c1", 0), ("c4", 0), ("c1", 1), ("c1", 2)]


def test_a_start_is_in_the_table_by_its_kind(recorder: Recorder) -> None:
    for kind, seconds in (("first", 9.0), ("later", 4.0)):
        recorder.add(("ours", kind, START, 0), {"ready_s": seconds})
    recorder.add(("ours", "warm", START, 0), value=NO_FIT)
    assert (
        _row(recorder, "first start / later / with the weights in the page cache, s")[0] == "9.0 / 4.0 / does not fit"
    )
    assert _row(recorder, "start, s, median")[0] == "2"


def test_a_table_of_several_shapes_has_fewer_rows(recorder: Recorder) -> None:
    runs = [recorder.run.as_result() | {"shape": shape, "model": shape} for shape in ("1B", "2B")]
    labels = [row[0] for row in report.comparison(runs)]
    assert "1B bf16: tokens/s at 1 / 4 streams, median" in labels and "2B bf16: most memory, MiB" in labels
    assert not any("best" in label or "idle" in label or "start, s" in label for label in labels)


def test_the_pages_say_what_the_results_say(tmp_path: Path) -> None:
    assert report.write_pages(check=True) == []
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text(page.read_text(encoding="utf-8").replace("150 / 461", "151 / 461"), encoding="utf-8")
    assert report.write_pages(tmp_path) == ["README.md"]
    assert page.read_text(encoding="utf-8") == (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--cases", "nonsense"], ["--endpoints", "telnet"]])
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(arguments)


@pytest.mark.slow
def test_a_quick_run_from_end_to_end(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "chip.jsonl"
    assert bench.main(["--quick", "--uri", str(tiny_model), "--output", str(kept)]) == 0
    assert "tokens/s at 1 / 4 streams" in capfd.readouterr().out
    (run,) = read_runs(kept)
    (server,) = run.as_result()["servers"]
    assert set(server["cases"]) == {"rest", "grpc"}
    for by_case in server["cases"].values():
        assert set(by_case) == {"c1", "c4", "p200"}
        assert by_case["c4"]["best"]["new_tokens"] == 4 * 8
    assert server["failures"] == {}
