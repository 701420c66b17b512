"""Which errors of a lock mean that another process has it, and which that the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.kept_files import to_remove
from mlserver_torch_stream.engine.mapped_file import map_file
from mlserver_torch_stream.file_lock import take_lock


@pytest.mark.parametrize(
    ("code", "taken"),
    [
        (errno.EWOULDBLOCK, False),
        (errno.EACCES, False),
        (errno.ENOLCK, True),
        (errno.ENOSYS, True),
        (errno.EOPNOTSUPP, True),
        (errno.EBADF, None),
        (errno.EIO, None),
    ],
)
def test_an_error_of_a_lock_is_no_lock_at_all_only_where_the_file_system_has_none(
    code: int, taken: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over CIFS, a lock of another machine is EACCES."""

    def refuse(*given: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "file").open("wb") as file:
        if taken is not None:
            assert take_lock(file.fileno()) is taken
            return
        with pytest.raises(OSError, match=os.strerror(code)):
            take_lock(file.fileno())


def test_a_file_that_another_process_is_removing_is_not_mapped(tmp_path: Path) -> None:
    """On a network file system, the first read after the removal would end the process."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with to_remove(path), pytest.raises(BlockingIOError, match="removing"):
        map_file(path, locks=True)
    mapped = map_file(path, locks=True)
    with pytest.raises(BlockingIOError), to_remove(path):
        pass
    assert bytes(mapped.tolist()) == b"abc"
