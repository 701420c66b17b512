"""Limits the size of the files that this process can write, so that a write fails as it does on a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def max_file_bytes(size: int) -> Iterator[None]:
    """Makes a write beyond ``size`` bytes of a file fail with EFBIG. Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
