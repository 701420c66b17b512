"""Unpacked archives are removed soon after their process has ended, and never those of another process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.handlers.config.archive import open_archive
from tests.torchserve.workshop import HELLO, write_mar

# Opens an archive, says where it is, and stays until its input ends.
_HOLDS = """
import sys
from mlserver_torch_stream.handlers.config.archive import open_archive
print(open_archive(sys.argv[1], None).folder, flush=True)
sys.stdin.readline()
"""
# Opens and closes it again and again: what it has unpacked is always there as long as it is open.
_CHURNS = """
import os, sys
from mlserver_torch_stream.handlers.config.archive import open_archive
for _ in range(150):
    archive = open_archive(sys.argv[1], None)
    inside = sorted(os.listdir(archive.folder))
    assert inside == ["MAR-INF", "hello.py"], inside
    if os.getpid() % 2:
        archive.close()  # the others leave theirs, held until their end
"""


@pytest.fixture
def mar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An archive, with a temporary folder of its own for the test."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield write_mar(tmp_path / "hello.mar", {"hello.py": HELLO}, {"modelName": "hello", "handler": "hello.py"})


def _start(program: str, mar: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, mar], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_a_killed_process_left_goes_with_the_next_load_and_what_a_living_one_has_stays(mar: str) -> None:
    temporary = Path(tempfile.gettempdir())
    with _start(_HOLDS, mar) as lives, _start(_HOLDS, mar) as killed:
        assert lives.stdout is not None and killed.stdout is not None
        held, left = Path(lives.stdout.readline().strip()), Path(killed.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir()
        archive = open_archive(mar, None)
        assert sorted(temporary.iterdir()) == sorted([held, archive.folder])
        assert (held / "hello.py").is_file()
        archive.close()
        archive.close()
        lives.kill()


def test_an_open_archive_of_this_very_process_stays(mar: str) -> None:
    first = open_archive(mar, None)
    second = open_archive(mar, None)
    assert (first.folder / "hello.py").is_file() and (second.folder / "hello.py").is_file()
    first.close()
    second.close()
    assert not list(Path(tempfile.gettempdir()).iterdir())


@pytest.mark.long
def test_processes_that_load_at_once_leave_each_other_alone(mar: str) -> None:
    started = [_start(_CHURNS, mar) for _ in range(4)]
    for each in started:
        with each:
            assert each.wait(100) == 0
    open_archive(mar, None).close()
    assert not list(Path(tempfile.gettempdir()).iterdir())


def test_only_folders_are_taken_for_left_ones(mar: str, tmp_path: Path) -> None:
    """The target of a link with such a name is not touched."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    temporary = Path(tempfile.gettempdir())
    (temporary / "mlserver-torch-stream-mar-link").symlink_to(tmp_path / "precious")
    (temporary / "mlserver-torch-stream-mar-file").touch()
    open_archive(mar, None).close()
    assert (tmp_path / "precious/file").is_file()
    assert len(list(temporary.iterdir())) == 2


@pytest.mark.parametrize(("code", "opens"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_folder_that_cannot_be_locked_fails_the_load_unless_its_file_system_has_no_locks(
    code: int, opens: bool, mar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next load would remove the folder of a living process if it had no lock."""

    def refuse(*given: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if opens:
        first, second = open_archive(mar, None), open_archive(mar, None)
        assert (first.folder / "hello.py").is_file()
        first.close()
        second.close()
    else:
        with pytest.raises(LoadFailed, match=r"cannot unpack .*the folder cannot be locked: Input/output error"):
            open_archive(mar, None)
    assert not list(Path(tempfile.gettempdir()).iterdir())


def test_without_a_temporary_folder_the_load_fails_with_the_reason(mar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(LoadFailed, match=r"cannot unpack .*/nowhere"):
        open_archive(mar, None)
