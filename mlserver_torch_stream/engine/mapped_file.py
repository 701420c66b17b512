"""Maps a file read-only as a tensor of bytes."""

from __future__ import annotations

import mmap
import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor


def map_file(path: Path) -> Tensor:
    """Returns the bytes of a file, which must not be written to. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with suppress(AttributeError, OSError):  # not on Linux, or not for this file system
        mapped.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.frombuffer(mapped, dtype=torch.uint8)
