"""The folder that an archive is unpacked into: a temporary one, its process's own as long as that lives.

Knows nothing of archives. The process holds a lock on the folder itself, which the kernel takes back however the
process ends: a folder that nobody holds was left by one that was killed, and is removed when the next one is made.
systemd-tmpfiles, too, lets folders be that are locked so.
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
    """Made, held, and gone with ``remove``."""

    def __init__(self) -> None:
        _remove_abandoned()
        made = tempfile.mkdtemp(prefix=f".{_PREFIX}")
        self._descriptor = os.open(made, _OPEN)
        with contextlib.suppress(OSError):  # a file system without locks: there, nothing is found to be abandoned
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # Held before it has the name that others look for: nobody sees it while it seems to be nobody's.
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
        except OSError:  # a link, a file, somebody else's, or gone meanwhile
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                logger.info("Removed %s, left by a process that was killed", path)
        except OSError:  # its process lives
            continue
        finally:
            os.close(descriptor)
