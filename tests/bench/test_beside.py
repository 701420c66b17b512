"""Two servers of one handler, measured beside each other, as TorchServe and ours are. Here both are ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.cases import QUICK, make_cases
from benchmarks.peers.torchserve.peer import HandlerServer, OurTorchServe
from benchmarks.prompts import Prompts
from benchmarks.results import START, Recorder, read_runs
from benchmarks.servers import Contender
from benchmarks.sweep import Plan, run_beside
from tests.bench.test_report import HEAD

_SCALE = replace(QUICK, prompt_tokens=16, new_tokens=3, wave_streams=2)


def _run(
    path: Path, kinds: Sequence[str], models: Sequence[Path], cases: Sequence[str], sweeps: int
) -> list[tuple[str, str, int]]:
    """Runs the cases, and returns the cells that were measured, in order."""
    before = path.read_text().count("\n") if path.exists() else 0
    head = {**HEAD, "servers": {"a": {}, "b": {}}}
    contenders: dict[str, Contender] = {
        name: HandlerServer(OurTorchServe(name), kind, model)
        for name, kind, model in zip("ab", kinds, models, strict=True)
    }
    prompts = Prompts(models[0])
    plan = Plan(make_cases(cases, _SCALE, prompts), _SCALE, prompts, sweeps, lenient=True)
    run_beside(contenders, plan, Recorder(path, head))
    lines = list(map(json.loads, path.read_text().splitlines()[before:]))
    return [(line["server"], line["case"], line["sweep"]) for line in lines if line.get("case", START) != START]


def _other(model: Path, folder: Path) -> Path:
    """Returns a model with other weights, so that its answers differ."""
    shutil.copytree(model, folder)
    changed = AutoModelForCausalLM.from_pretrained(model)
    changed.model.embed_tokens.weight.data = changed.model.embed_tokens.weight.data.flip(0)
    changed.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_each_case_runs_on_both_servers_in_turn_and_a_stopped_run_measures_both_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    path, kinds, models = tmp_path / "chip.jsonl", ("h1-stream", "h16-whole"), [tiny_model, tiny_model]
    first = [("a", "c1", 0), ("b", "c1", 0), ("a", "c2", 0), ("b", "c2", 0)]
    assert _run(path, kinds, models, ("c1", "c2"), 1) == first
    streamed, whole = (read_runs(path)[-1].cells[name, "rest", "c1", 0]["figures"] for name in "ab")
    assert (streamed["new_tokens"], streamed["events"]) == (6, 6) and (whole["new_tokens"], whole["events"]) == (6, 2)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    second = [("b", "c1", 1), ("a", "c1", 1), ("b", "c2", 1), ("a", "c2", 1)]
    assert _run(path, kinds, models, ("c1", "c2"), 2) == [*first[2:], *second]
    assert _run(path, kinds, models, ("c1", "c2"), 2) == []
    assert {"value", "figures"} & set().union(*read_runs(path)[-1].cells.values()) == {"figures"}


@pytest.mark.slow
def test_a_server_that_gives_one_client_other_answers_has_no_figures(tiny_model: Path, tmp_path: Path) -> None:
    path, models = tmp_path / "chip.jsonl", [tiny_model, _other(tiny_model, tmp_path / "other")]
    _run(path, ("h1-whole", "h1-whole"), models, ("c1", "c2"), 1)
    cells = read_runs(path)[-1].cells
    assert {cells[name, "rest", "c1", 0].get("value") for name in "ab"} == {"the servers' answers differ"}
    assert all("figures" in cells[name, "rest", "c2", 0] for name in "ab")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_requests_are_counted_by_wrk(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "chip.jsonl"
    _run(path, ("requests", "requests"), [tiny_model, tiny_model], ("r5",), 1)
    figures = read_runs(path)[-1].cells["b", "rest", "r5", 0]["figures"]
    assert figures["requests_per_s"] > 0 and 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["cpu_s_per_1000"] > 0 and figures["rss_mib"] > 0
