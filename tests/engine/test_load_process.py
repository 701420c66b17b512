"""A function in a process of its own: its result, its errors, its log lines, and the ends of both processes."""

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
from mlserver_torch_stream.engine.child_process import in_process, started_ahead
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.loading import process_ahead
from mlserver_torch_stream.settings import parse_settings
from tests.engine.process_jobs import (
    children,
    die,
    doubled,
    ended_by_signals,
    fail,
    fail_oddly,
    log_badly,
    look_up,
    pid_with,
    send_no_message,
)

_EMBEDDED = "embedded://smollm2-135m-instruct"
_ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
_RUNS = """
import sys
from mlserver_torch_stream.engine.child_process import in_process
from tests.engine.process_jobs import wait_for_ever
in_process(wait_for_ever, sys.argv[1])
"""
_WAITS = """
import sys, time
from pathlib import Path
from mlserver_torch_stream.engine.child_process import started_ahead
from tests.engine.process_jobs import children
with started_ahead():
    Path(sys.argv[1]).write_text(str(*children()))
    time.sleep(600)
"""
_FAILS = """
import sys
from mlserver_torch_stream import loading
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.process_jobs import children

def importing(name, path=None, target=None):
    if name == "torch":
        print(len(children()))

sys.meta_path.insert(0, type("Watch", (), {"find_spec": staticmethod(importing)}))
try:
    loading.build(parse_settings("embedded://unknown", {"weights": "packed"}, environ={}), "owner", print)
except LoadFailed as error:
    print(error)
print(len(children()))
"""


def test_the_result_comes_back_and_the_log_lines_are_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    """Output to stdout, which carries the messages, does not disturb them."""
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
    with pytest.raises(LoadFailed, match=r"^the process that loads the model sent something that is no message"):
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


@_ON_LINUX
def test_a_process_started_ahead_imports_its_modules_runs_one_function_and_ends() -> None:
    module, others = "tests.engine.test_heap", children()
    with started_ahead(module):
        (ahead,) = children() - others
        assert in_process(pid_with, module) == (ahead, True)
        assert children() == others
        assert in_process(pid_with, module) != (ahead, True)  # a new one


@_ON_LINUX
def test_a_process_started_ahead_that_is_not_used_ends_with_the_load() -> None:
    others = children()
    with pytest.raises(KeyError), started_ahead():
        assert len(children() - others) == 1
        raise KeyError
    assert children() == others


def test_an_import_ahead_that_fails_fails_the_load() -> None:
    with started_ahead("tests.engine.no_such_module"), pytest.raises(ModuleNotFoundError, match="no_such_module"):
        in_process(fail)


@_ON_LINUX
@pytest.mark.parametrize(
    ("model", "extra", "starts"),
    [
        (_EMBEDDED, {"weights": "packed"}, 1),
        (_EMBEDDED, {"weights": "packed", "device_map": "cpu"}, 1),
        (_EMBEDDED, {"weights": "packed", "device_map": "cuda"}, 0),
        (_EMBEDDED, {"weights": "packed", "tensor_parallel_size": 2}, 0),
        (_EMBEDDED, {}, 0),
        ("org/name", {"weights": "packed"}, 0),
        ("org/name", {}, 0),
    ],
)
def test_only_packed_weights_on_the_cpu_start_a_process_ahead(
    model: str, extra: dict[str, object], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, others = parse_settings(model, extra, environ={}), children()
    monkeypatch.delitem(sys.modules, "mlserver_torch_stream.engine.build", raising=False)
    with process_ahead(resolved):
        assert len(children() - others) == starts
    monkeypatch.setitem(sys.modules, "mlserver_torch_stream.engine.build", sys)
    with process_ahead(resolved):  # nothing to import at the same time
        assert children() == others


@_ON_LINUX
def test_a_load_starts_the_process_before_it_imports_torch_and_leaves_none_when_it_fails() -> None:
    told = subprocess.run([sys.executable, "-c", _FAILS], capture_output=True, text=True, check=True, timeout=120)
    first, *error, last = told.stdout.splitlines()
    assert (first, last) == ("1", "0")
    assert "no embedded model 'unknown'" in error[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the process on Linux alone")
@pytest.mark.parametrize("script", [_RUNS, _WAITS], ids=["runs", "waits"])
def test_the_process_ends_with_its_parent(script: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", script, str(pid_file)])
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
    """Whether a process runs. A zombie, which nobody has waited for, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")
