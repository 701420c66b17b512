"""Gives the heap's free blocks back to the system, which glibc keeps below the highest block in use.

Knows nothing of models. Measured on 2026-11-21: it frees 80 of the 841 MiB of a process that has loaded SmolLM2.
"""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Trims glibc's heap, in milliseconds, after a load or an unload. Has no effect with other C libraries."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
