"""One large object: rows of JSONL are read in blocks, whatever its size; other formats are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import cloud, trouble
from tests.cloud.models import ModelServer
from tests.markdown import ROOT


def _read(mib: int, window_mib: int, ahead_mib: int) -> dict[str, float]:
    """Runs in a separate process, whose memory nothing else has used; the process asserts that all rows arrive."""
    script = [sys.executable, "-m", "tests.cloud.large", *map(str, (mib, window_mib, ahead_mib))]
    told = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert told.returncode == 0, told.stderr
    found: dict[str, float] = json.loads(told.stdout)
    assert found["rows"] == mib and found["undelivered_bytes"] <= window_mib * 2**20
    return found


@pytest.mark.long
def test_rows_of_a_large_object_come_in_blocks_and_do_not_pile_up_behind_a_slow_head() -> None:
    """Measured: 50 to 58 MiB, of which 16 are the window and 16 are fetched ahead; 166 with a window of 128."""
    assert _read(192, 16, 16)["grown_mib"] <= 110


@pytest.mark.slow
def test_two_gib_of_rows_need_no_more_memory_than_the_bounds_say() -> None:
    assert _read(2048, 128, 64)["grown_mib"] <= 400


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.orc", "ORC"),
        ("a.jsonl.bz2", "compressed"),
        ("a.avro", "Avro"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--as", "jsonl"), ("--as", "text")])
def test_formats_that_are_not_looked_into_are_refused_by_name(
    name: str, form: str, options: tuple[str, ...], tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    with (tmp_path / name).open("wb") as out:
        out.truncate(2 * 2**30)  # which takes no room
    assert cloud("run", "--input", tmp_path, "--url", server.url, *options) == 2
    told = f"--input: contains {name}, which is {form}, a format that is not supported; convert its rows to JSONL"
    assert told in capsys.readouterr().err and not server.asked


def test_other_objects_that_the_model_cannot_take_are_named(tmp_path: Path, server: ModelServer, capsys: Any) -> None:
    (tmp_path / "a.bin").write_text("x")
    assert cloud("run", "--input", tmp_path, "--url", server.url) == 2
    assert "contains a.bin, of kind bytes, which this model does not accept" in capsys.readouterr().err


def test_an_object_that_is_one_row_and_too_large_is_an_error_row_that_says_how_large_it_may_be(
    tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    with (tmp_path / "a.txt").open("wb") as out:
        out.truncate(2 * 2**30)
    (tmp_path / "b.txt").write_text("abc")
    assert cloud("run", "--input", tmp_path, "--url", server.url, "--dry-run") == 0
    assert "too large: 1 over 64.0 MiB, each an error row: a.txt" in capsys.readouterr().out
    assert cloud("run", "--input", tmp_path, "--url", server.url) == 1
    large, small = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert large["error"]["code"] == "too_large" and small["error"] is None
    assert "2147483648 bytes, larger than 64.0 MiB" in large["error"]["message"]


def test_a_watcher_says_of_such_an_object_what_it_is_and_goes_on(tmp_path: Path, server: ModelServer) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.orc").write_bytes(b"ORC")
    (tmp_path / "in" / "b.txt").write_text("abc")
    watch = ("watch", "--input", tmp_path / "in", "--output", tmp_path / "out", "--poll", "0.05", "--limit", "2")
    assert cloud(*watch, "--url", server.url) == 1
    found = [json.loads(path.read_bytes()) for path in (tmp_path / "out").glob("result-*")]
    ends = {each["key"]: (trouble(each) or {"message": None})["message"] for each in found}
    assert ends == {"a.orc": "a.orc: the model does not accept ORC", "b.txt": None}
