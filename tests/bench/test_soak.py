"""The soak test finds growth and lost counts, and a real server answers its requests.

The checks of GPUs are refused by name on a machine without one, and their page explains them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.servers import Ours
from benchmarks.soak import Held, SoakClient, WrongAnswer, problems, soak, summary
from benchmarks.sweep import started
from tests import markdown

_FLAT = [Held(100 * number, 500.0, 40, 20) for number in range(1, 41)]


def test_what_stays_is_no_problem() -> None:
    assert problems(_FLAT, 80, 80) == []


def test_growth_during_the_warm_up_is_no_problem() -> None:
    assert problems([replace(each, rss_mib=10.0) for each in _FLAT[:10]] + _FLAT[10:], 80, 80) == []


@pytest.mark.parametrize(("name", "step"), [("rss_mib", 2.0), ("descriptors", 1), ("threads", 1)])
def test_growth_after_the_warm_up_is_found_by_name(name: str, step: float) -> None:
    grown = [replace(each, **{name: getattr(each, name) + step * number}) for number, each in enumerate(_FLAT)]
    (found,) = problems(grown, 80, 80)
    assert found.startswith(f"{name} grew")


def test_a_token_that_is_not_counted_is_a_problem() -> None:
    assert problems(_FLAT, 80, 79) == ["the answers have 80 tokens, but the server counted 79"]


def test_the_summary_compares_what_is_held_at_the_end_with_the_time_after_the_warm_up() -> None:
    held = [replace(each, rss_mib=400.0 + number) for number, each in enumerate(_FLAT)]
    result = {"requests": 4000, "seconds": 90.0, "tokens": 80, "counted": 79, "date": "2026-11-22T10:00:00+00:00"}
    text = summary({**result, "cores": 2, "cpu": "a chip"}, held)
    assert "4,000 requests" in text and "RSS 419, then 439" in text and "79 of 80 tokens (2026-11-22, 2 cores" in text


@pytest.mark.slow
def test_every_request_is_answered_and_its_tokens_are_counted(tiny_model: Path) -> None:
    with started(Ours(str(tiny_model))) as server:
        client = SoakClient(server.http_port, server.grpc_port)
        count = len(client.requests)
        client.close()
        held, tokens, counted = soak(server, 4 * count)
        assert held[-1].requests == 4 * count > 100 and tokens == counted > 0


@pytest.mark.slow
def test_a_wrong_answer_ends_the_soak(tiny_model: Path) -> None:
    with started(Ours(str(tiny_model), model="other")) as server, pytest.raises(WrongAnswer, match="404"):
        soak(server, 100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "this machine has no CUDA device" in capsys.readouterr().err


def test_the_page_explains_every_check() -> None:
    rows = markdown.table("docs/gpu.md", "GPUs")
    assert [name.strip("`") for name, _ in rows] == list(gpu.CHECKS)


@pytest.mark.long
def test_what_needs_no_gpu_runs_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--dry", "--json", str(tmp_path / "lines")]) == 0
    said = capsys.readouterr().out
    assert "1 streams: " in said and "3 streams: " in said
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["streams"] for line in lines if line.get("tokens_per_s", 0) > 0] == [1, 3]
    assert lines[0]["check"] == "machine" and torch.__version__ in lines[0]["line"]


def test_no_check_of_a_gpu_begins_after_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[gpu.Bench] = []
    monkeypatch.setitem(gpu.CHECKS, "tokens", ran.append)
    assert gpu.run(gpu.Bench(Path(), layers=2, seconds=0.0, gpus=1), ["tokens"], limit=-1.0) == 0
    assert not ran and "--checks tokens" in capsys.readouterr().out


def test_a_check_that_breaks_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: gpu.Bench) -> None:
        raise RuntimeError("no kernel")

    ran: list[gpu.Bench] = []
    monkeypatch.setitem(gpu.CHECKS, "tokens", broken)
    monkeypatch.setitem(gpu.CHECKS, "streams", ran.append)
    bench = gpu.Bench(Path(), layers=2, seconds=0.0, gpus=1)
    assert gpu.run(bench, ["tokens", "streams"]) == 1
    assert bench.wrong == ["tokens: RuntimeError: no kernel"] and ran == [bench]


@pytest.mark.parametrize(("check", "what"), [("several", "a map over several GPUs"), ("ranks", "a split model")])
def test_what_needs_two_gpus_is_skipped_by_name(capsys: pytest.CaptureFixture[str], check: str, what: str) -> None:
    bench = gpu.Bench(Path(), layers=2, seconds=0.0, gpus=1)
    gpu.CHECKS[check](bench)
    assert f"skipped: {what}: needs two GPUs, this machine has 1" in capsys.readouterr().out
    assert not bench.wrong
