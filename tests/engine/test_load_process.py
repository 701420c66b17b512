"""Runs a function in a separate process: its result, its errors, its log lines, and the end of either process."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlserver_torch_stream.engine import child_process
from mlserver_torch_stream.engine.child_process import how_it_ended, in_process
from mlserver_torch_stream.errors import LoadFailed
from tests.engine.process_jobs import (
    die,
    doubled,
    ended_by_signals,
    fail,
    fail_oddly,
    log_badly,
    look_up,
    send_no_message,
)

_ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
_RUNS = """
import sys
from mlserver_torch_stream.engine.child_process import in_process
from tests.engine.process_jobs import wait_for_ever
in_process(wait_for_ever, sys.argv[1])
"""


def test_each_status_of_a_process_has_words() -> None:
    """Most real-time signals have no name."""
    assert [how_it_ended(status) for status in (3, -9, -40)] == [
        *("ended with status 3", "was killed by SIGKILL", "was killed by signal 40")
    ]


def test_the_result_comes_back_and_the_log_lines_are_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    """Messages are sent over stdout; other output to stdout does not disturb them."""
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        assert in_process(doubled, [1, 2]) == [2, 4]
    assert caplog.record_tuples == [
        ("mlserver_torch_stream.engine.loading", logging.INFO, "doubling 2 numbers"),
        ("mlserver_torch_stream", logging.WARNING, "100 %"),
    ]


def test_an_error_is_raised_here_as_it_was_there() -> None:
    with pytest.raises(LoadFailed, match=r"^the file lacks the weights x$"):
        in_process(fail)


def test_an_error_other_than_loadfailed_brings_its_traceback() -> None:
    with pytest.raises(KeyError, match="missing") as raised:
        in_process(look_up)
    assert "in look_up" in str(raised.value.__cause__)


def test_a_log_call_that_fails_does_not_fail_the_load_and_tracebacks_are_logged_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert in_process(log_badly) == "done"
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("it failed\nTraceback") and "KeyError: 'the cause'" in text


def test_what_is_printed_at_the_start_of_python_does_not_disturb_the_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('noise', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert in_process(doubled, [1]) == [2]


def test_a_process_that_sends_something_else_is_killed_and_fails_the_load() -> None:
    with pytest.raises(LoadFailed, match=r"^the process that loads the model sent something that is not a message"):
        in_process(send_no_message)


def test_the_process_imports_from_the_folders_of_its_parent_and_not_from_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base64.py").write_text("raise ImportError('of the working folder')")
    (folder := tmp_path / "added").mkdir()
    (folder / "jobs_in_an_added_folder.py").write_text("def answer():\n    return 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    assert in_process(importlib.import_module("jobs_in_an_added_folder").answer) == 42


def test_signals_that_reach_the_whole_process_group_end_the_parent_alone() -> None:
    assert in_process(ended_by_signals) == "none"


def test_an_error_that_cannot_be_pickled_keeps_its_name_and_message() -> None:
    with pytest.raises(RuntimeError, match=r"^TwoParts: one and two$"):
        in_process(fail_oddly)


def test_a_killed_process_fails_the_load_with_the_signal() -> None:
    said = r"^the process that loads the model was killed by SIGKILL \(usually a lack of memory\)$"
    with pytest.raises(LoadFailed, match=said):
        in_process(die)


def test_a_process_that_cannot_be_started_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process.sys, "executable", "/no/such/python")
    with pytest.raises(LoadFailed, match=r"^cannot start a process that loads the model: .*No such file"):
        in_process(fail)


def test_a_python_without_a_known_interpreter_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process.sys, "executable", None)
    with pytest.raises(LoadFailed, match=r"sys\.executable names no interpreter"):
        in_process(fail)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the process on Linux alone")
def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", _RUNS, str(pid_file)])
    try:
        _until(lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    child = int(pid_file.read_text())
    _until(lambda: not _runs(child))


def _until(holds: object) -> None:
    assert callable(holds)
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("not within a minute")


def _runs(pid: int) -> bool:
    """Returns whether a process is running; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")
