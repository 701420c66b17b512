"""Unmaps the code of shared libraries that imports and the load have touched: the next use of a page maps it again.

Knows nothing of models. The pages stay in the system's page cache, so that mapping one again takes a microsecond.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_DONT_NEED = 4  # MADV_DONTNEED
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (r-xp|r--p) \S+ \S+ \S+ +(/.*)\n((?:\w.*\n)*?)(?=[0-9a-f]+-|\Z)", re.M)


def unmap_code() -> None:
    """Unmaps the unchanged read-only pages of the libraries in torch's site-packages. Has an effect on Linux only.

    Python never closes an extension module, so that no other memory can take the place of such a library meanwhile.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, end in unchanged_pages(Path(torch.__file__).parents[1]):
        advise(first, end - first, _DONT_NEED)


def unchanged_pages(folder: Path) -> Iterator[tuple[int, int]]:
    """Yields the addresses of read-only mappings of this process's libraries in ``folder``: the first and the end.

    Mappings with a page of their own, in memory or swapped out, are left out: its contents are in no file.
    """
    for first, end, _, path, counts in _MAPPING.findall(Path("/proc/self/smaps").read_text()):
        changed = re.search(r"^(Anonymous|Swap): +[1-9]", counts, re.M)
        if ".so" in Path(path).name and Path(path).is_relative_to(folder) and changed is None:
            yield int(first, 16), int(end, 16)
