"""A script that is forked from a process with its imports finds the same environment as in a separate Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.server.fork_server import ForkedProcess, ForkServer, fork_server

_SCRIPT = """
import json, os, signal, sys, threading
import beside, found
if sys.argv[1:] == ["wait"]:
    signal.pause()
descriptors = [each for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")]
facts = [__name__, sys.argv, os.getcwd(), dict(os.environ), threading.active_count(), len(descriptors)]
print(json.dumps(facts), flush=True)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that imports a module from its own folder and one from PYTHONPATH."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "found.py").touch()
    (tmp_path / "beside.py").touch()
    path = tmp_path / "script"
    path.write_text(_SCRIPT)
    return path


def environment(script: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(script.parent / "path"), "MLSERVER_FOO": "1"}


def started(script: Path, *arguments: str) -> ForkedProcess:
    with (script.parent / "log").open("wb") as log:
        return fork_server().start([str(script), *arguments], script.parent, environment(script), log)


def facts(log: Path) -> list[object]:
    told, stderr = log.read_text().splitlines()
    assert stderr == "to stderr"
    found: list[object] = json.loads(told)
    return found


def test_it_has_the_name_arguments_folder_variables_descriptors_and_status_of_a_process_of_its_own(
    script: Path, tmp_path: Path
) -> None:
    assert fork_server().suits(environment(script))
    assert started(script, "a", "b").wait(30) == 7
    forked = facts(tmp_path / "log")
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, str(script), "a", "b"]
        own = subprocess.run(command, cwd=tmp_path, env=environment(script), stdout=log, stderr=log, timeout=60)
    assert own.returncode == 7
    assert forked == facts(tmp_path / "log")


def test_no_two_of_them_draw_the_same_random_numbers(tmp_path: Path) -> None:
    script = tmp_path / "draws"
    script.write_text(
        "import random, tempfile, numpy, uuid\n"
        "print(random.random(), numpy.random.rand(), tempfile.mktemp(), uuid.uuid4())\n"
    )
    drawn = []
    for _ in range(2):
        with (tmp_path / "log").open("wb") as log:
            assert fork_server().start([str(script)], tmp_path, os.environ, log).wait(30) == 0
        drawn.append((tmp_path / "log").read_text().split())
    assert len(drawn[0]) == 4 and not set(drawn[0]) & set(drawn[1])


@pytest.mark.long
def test_all_processes_of_a_run_have_one(tmp_path: Path) -> None:
    script = tmp_path / "parent"
    script.write_text("import os; print(os.getppid())")

    def parent(server: ForkServer) -> str:
        with (tmp_path / "log").open("wb") as log:
            assert server.start([str(script)], tmp_path, os.environ, log).wait(30) == 0
        return (tmp_path / "log").read_text()

    one, other = fork_server(), ForkServer()
    first, second = parent(one), parent(other)
    other.close()
    assert first == second == parent(one)


def test_it_takes_signals_and_is_waited_for_as_any_process(script: Path) -> None:
    process = started(script, "wait")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(30) == process.returncode == -signal.SIGKILL
    process.terminate()  # of an ended process: nothing


@pytest.mark.parametrize("changed", [{"OMP_NUM_THREADS": "1"}, {"HF_HOME": "/nowhere"}, {"PYTHONPATH": "early"}])
def test_variables_that_are_read_by_imports_need_a_python_of_their_own(
    changed: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").touch()
    assert not fork_server().suits({**os.environ, **changed})
