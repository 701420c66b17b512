"""Gives the heap's free blocks back to the system, which glibc keeps below the highest block in use.

Knows nothing of models. Measured on 2026-11-21: 80 MiB of the 841 of a process that has just loaded SmolLM2.
"""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Without effect where the C library is not glibc. Takes milliseconds; meant for after a load and an unload."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
