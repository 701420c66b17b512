"""The parts of one run, distributed over a real local Ray cluster; needs the extra [ray]."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from mlserver_torch_stream.cli.cloud import run_lane
from tests.cloud.command import cloud, finish, joined, start
from tests.cloud.faulty import Fault, faulty_server
from tests.cloud.models import ModelServer

_RAY = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.slow
def test_a_local_cluster_writes_each_part_once_and_the_same_output(tmp_path: Path, server: ModelServer) -> None:
    pytest.importorskip("ray")
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"custom_id": f"r{i}", "prompt": f"row {i}"}) for i in range(50)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    run = ("run", "--input", tmp_path / "in", "--url", server.url, "--part-rows", "4")
    assert cloud(*run, "--output", tmp_path / "alone") == 0
    server.asked.clear()
    environment = {**_RAY, "PYTHONPATH": os.getcwd()}
    on_ray = (*run, "--output", tmp_path / "out", "--on", "ray", "--workers", "2")
    server.trouble = lambda prompt, before: 422 if prompt in ("row 7", "row 23") else None
    status, _, err = finish(start(*on_ray, environment=environment), 300)
    assert status == 1, err
    assert f"50 rows in {tmp_path / 'out'}, 2 failed; 2 workers" in err
    assert "Warning" not in err and "deprecated" not in err, err
    server.trouble = lambda prompt, before: None
    status, _, err = finish(start(*on_ray, "--retry-failed", environment=environment), 300)
    assert status == 0, err
    assert f"50 rows in {tmp_path / 'out'}, 0 failed; 2 workers" in err
    assert joined(tmp_path / "out") == joined(tmp_path / "alone")
    assert sorted(server.asked) == sorted([f"row {i}" for i in range(50)] + ["row 7", "row 23"])
    assert sorted(path.name for path in (tmp_path / "out").glob("done*")) == ["done-1-of-2.json", "done-2-of-2.json"]


@pytest.mark.slow
def test_a_worker_whose_process_dies_goes_on_in_another_and_all_rows_are_counted(
    tmp_path: Path, server: ModelServer
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(60)))
    server.delay = 0.3
    run = ("run", "--input", tmp_path / "in", "--url", server.url, "--part-rows", "4", "--concurrency", "2")
    on_ray = (*run, "--output", tmp_path / "out", "--on", "ray", "--workers", "2")
    process = start(*on_ray, environment={**_RAY, "PYTHONPATH": os.getcwd()})
    end = time.monotonic() + 200
    while len(list((tmp_path / "out").glob("part-*"))) < 3:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    lanes = [each for each in below if "run_lane" in " ".join(each.cmdline())]
    assert lanes, [each.cmdline()[:1] for each in below]
    lanes[0].kill()
    status, _, err = finish(process, 300)
    assert status == 0, err
    assert f"60 rows in {tmp_path / 'out'}, 0 failed; 2 workers" in err
    rows = [json.loads(line) for line in joined(tmp_path / "out").splitlines()]
    assert [row["index"] for row in rows] == list(range(60))


@pytest.mark.slow
def test_ctrl_c_before_the_cluster_is_asked_is_no_traceback(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "in").mkdir()
    with faulty_server({"/v1/models": b"{}"}) as silent:
        silent.faults["/v1/models"] = [Fault("stall")]
        run = ("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--on", "ray")
        process = start(*run, "--url", silent.url, "--api", "openai", environment=_RAY)
        end = time.monotonic() + 120
        while not silent.asked:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        status, _, err = finish(process)
    assert status == 130 and "interrupted before anything was inferred" in err and "Traceback" not in err


def test_a_lane_has_the_defaults_of_a_run_at_a_server(tmp_path: Path, server: ModelServer) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(8)))
    where = ("--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--url", server.url)
    lanes = [("--part-rows", "2", "--progress", "off", "--on", "ray", "--worker", f"{i}/2") for i in (1, 2)]
    assert [run_lane(["run", *where, *lane]) for lane in lanes] == [0, 0]
    assert len(joined(tmp_path / "out").splitlines()) == len(server.asked) == 8


def test_without_ray_its_absence_is_named(
    tmp_path: Path, server: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    (tmp_path / "in").mkdir()
    run = ("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--url", server.url, "--on", "ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        assert cloud(*run) == 2
    assert "[ray]" in capsys.readouterr().err
