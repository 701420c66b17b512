"""Keeps files in the cache folder. Files that are truncated or that another user can write are not used.

The name of a file ends with its checksum. Compiled kernels, records of checked loads and packed weights are kept in
this way, because the server executes the kernels and trusts the other files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlserver_torch_stream.engine.fingerprint import checksum, flush

logger = logging.getLogger(__name__)

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_ABANDONED = (".compiling-*", ".writing-*", "*.partial-*")  # the folders in which files are made
_ABANDONED_S = 24 * 3600.0


@contextmanager
def os_errors() -> Iterator[None]:
    """Raises OSError where safetensors or tokenizers report an error of the system, such as a full disk, as another."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def keep(
    made: Path, folder: Path, stem: str, digest: Callable[[Path], str] = checksum, flushes: bool = True
) -> Path | None:
    """Moves a file to where ``kept_files`` finds it, within the same file system, and returns the new path.

    If the folder is not writable, logs one warning and returns None. ``flushes`` is needed unless ``digest`` covers all
    bytes.
    """
    target = folder / f"{stem}-{digest(made)}{made.suffix}"
    try:
        made.chmod((made.stat().st_mode | _READ) & ~_OTHERS)  # an image that root builds can run as another user
        if flushes:
            flush(made)
        made.replace(target)
        if flushes:
            flush(folder)
    except OSError as error:
        logger.warning("%s cannot be kept in %s: %s", made.name, folder, error.strerror)
        return None
    return target


def kept_files(folder: Path, pattern: str, digest: Callable[[Path], str] = checksum) -> Iterator[Path]:
    """Yields the files of this pattern that can be trusted, and removes damaged ones.

    ``digest`` returns the checksum with which a whole file's name ends. Files that another user owns or can write are
    neither used nor removed.
    """
    for path in sorted(folder.glob(pattern)):
        try:
            reason = foreign(path)
            whole = reason is None and path.stem.rpartition("-")[2] == digest(path)
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
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"the user {status.st_uid} owns it"
    if status.st_mode & _OTHERS:
        return "other users can write it"
    return replaceable(path.parent)


def replaceable(folder: Path) -> str | None:
    """Returns which other users can replace a file in this folder of the cache folder; None if only trusted users can.

    Raises OSError if one of the two folders cannot be examined.
    """
    # Whoever can write to the cache folder can replace the folder in it.
    return next(filter(None, (_replaceable(each.stat()) for each in (folder, folder.parent))), None)


def _replaceable(folder: os.stat_result) -> str | None:
    """Returns which other users can rename files into this folder; None if only trusted users can.

    Without the sticky bit, a folder's owner is not checked. Only root and the members of a group can write to another
    user's folder, as a container does to a volume of its host.
    """
    # A user's own group is often private, and Kubernetes gives a volume to a pod's ``fsGroup`` and sets its setgid bit.
    own = {os.getegid(), *(os.getgroups() if folder.st_mode & stat.S_ISGID else ())}
    if folder.st_mode & stat.S_IWOTH:
        who = "every user"
    elif folder.st_mode & stat.S_IWGRP and folder.st_gid not in own:
        who = f"the group {folder.st_gid}"
    else:
        return None
    if folder.st_mode & stat.S_ISVTX:  # only the owners of a file and of the folder can replace the file
        if folder.st_uid in (os.geteuid(), 0):
            return None
        who = f"the user {folder.st_uid}, who owns the folder,"
    return f"{who} can replace it"


@contextmanager
def to_remove(path: Path) -> Iterator[None]:
    """Locks a file while the block removes it. Raises OSError if a process holds it, or if it cannot be written.

    A process holds a file by ``map_file`` with ``locks``. On a local disk a mapped file that is removed stays readable;
    on a network file system the next read of it kills the process by SIGBUS.
    """
    with path.open("r+b") as file:  # over NFS, only a file that can be written can be locked alone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Removes abandoned folders, and the files of this pattern that no process holds, except the newest ``count``."""
    ages = {}
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process has just removed it
            ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=ages.__getitem__)[:-count]:
        with suppress(OSError), to_remove(path):
            path.unlink()
    remove_abandoned(folder)


def remove_abandoned(folder: Path) -> None:
    """Removes the folders in which killed processes were making files more than a day ago."""
    for place in (place for pattern in _ABANDONED for place in folder.glob(pattern)):
        with suppress(OSError):  # another process has just removed it
            if place.lstat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(place)
