"""Maps a file read-only as a tensor of bytes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from mlserver_torch_stream.file_lock import take_lock


def map_file(path: Path, *, locks: bool = False) -> Tensor:
    """Returns the bytes of a file, which must not be written to. Raises OSError if the file cannot be read.

    With ``locks`` the file has a shared lock for as long as it is mapped, if its file system has locks. OSError is also
    raised if another process is removing the file, as ``to_remove`` describes.
    """
    with path.open("rb") as file:
        # The mapping has a duplicate of the descriptor, and with it the lock.
        if locks and not take_lock(file.fileno(), fcntl.LOCK_SH):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process is removing it", str(path))
        if not os.fstat(file.fileno()).st_size:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with suppress(AttributeError, OSError):  # not on Linux, or not for this file system
        mapped.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.frombuffer(mapped, dtype=torch.uint8)
