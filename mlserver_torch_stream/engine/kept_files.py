"""Keeps small files in the cache folder. Files that are truncated or that another user can write are not used.

The name of a file ends with its checksum. Compiled kernels and records of checked loads are kept in this way, because
the server executes the kernels and trusts the records.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlserver_torch_stream.engine.fingerprint import checksum, flush

logger = logging.getLogger(__name__)

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


def keep(made: Path, folder: Path, stem: str) -> Path | None:
    """Moves a file to where ``kept_files`` finds it, within the same file system, and returns the new path.

    If the folder is not writable, logs one warning and returns None.
    """
    target = folder / f"{stem}-{checksum(made)}{made.suffix}"
    try:
        made.chmod((made.stat().st_mode | _READ) & ~_OTHERS)  # an image that root builds can run as another user
        flush(made)
        made.replace(target)
        flush(folder)
    except OSError as error:
        logger.warning("%s cannot be kept in %s: %s", made.name, folder, error.strerror)
        return None
    return target


def kept_files(folder: Path, pattern: str) -> Iterator[Path]:
    """Yields the files of this pattern that can be trusted, and removes damaged ones.

    Files that another user owns or can write are neither used nor removed.
    """
    for path in sorted(folder.glob(pattern)):
        try:
            reason = foreign(path)
            whole = reason is None and path.stem.rpartition("-")[2] == checksum(path)
        except OSError as error:
            reason, whole = error.strerror, False
        if whole:
            yield path
        elif reason is not None:
            logger.warning("%s is not used: %s", path, reason)
        else:
            logger.warning("%s is damaged and not used", path)
            with suppress(OSError):  # a read-only folder
                path.unlink()


def foreign(path: Path) -> str | None:
    """Returns why other users may have written a file; None if only this user or root can have written it.

    Raises OSError if the file or its folder cannot be examined.
    """
    status, folder = path.lstat(), path.parent.stat()
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"the user {status.st_uid} owns it"
    if status.st_mode & _OTHERS:
        return "other users can write it"
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return "every user can replace it"
    return None
