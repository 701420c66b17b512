"""Locks files, also on network file systems."""

from __future__ import annotations

import errno
import fcntl

_HELD = {errno.EWOULDBLOCK, errno.EACCES}  # the second over CIFS, where another machine has the lock
# For example NFS whose server runs no lock daemon, Lustre mounted without locks, FUSE whose program has none.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def take_lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Tries to lock an open file, without waiting. Returns False if another process has the lock.

    On a file system without locks it returns True, as if nobody else used the file. Raises OSError for other errors,
    such as EBADF: over NFS, only a file that is open for writing can be locked alone.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def wait_for_lock(file: int) -> None:
    """Locks an open file alone, and waits while another process has the lock.

    On a file system without locks it returns at once. Raises OSError for other errors.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
