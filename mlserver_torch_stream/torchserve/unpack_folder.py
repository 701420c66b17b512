"""Makes the temporary folder that an archive is unpacked into, which belongs to this process as long as it lives.

Knows nothing of archives. The process holds a lock on the folder, which the kernel releases however the process ends. A
folder without a lock was left by a process that was killed, and is removed when the next folder is made.
systemd-tmpfiles leaves folders with such a lock alone, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)
_PREFIX = "mlserver-torch-stream-mar-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class OwnFolder:
    """A new folder, locked by this process until ``remove``."""

    def __init__(self) -> None:
        _remove_abandoned()
        made = tempfile.mkdtemp(prefix=f".{_PREFIX}")
        self._descriptor = os.open(made, _OPEN)
        with contextlib.suppress(OSError):  # on a file system without locks no folder is removed as abandoned
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # The folder gets the name that other processes look for when it is locked already.
        self.path = Path(made).rename(Path(made).with_name(Path(made).name[1:]))

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _remove_abandoned() -> None:
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        try:
            descriptor = os.open(path, _OPEN)
        except OSError:  # a link, a file, another user's folder, or a removed one
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                logger.info("Removed %s, left by a process that was killed", path)
        except OSError:  # its process is alive
            continue
        finally:
            os.close(descriptor)
