"""Drops the resident pages of shared libraries' code that imports and the load have touched: the next use maps them.

The pages stay in the system's page cache, so that mapping one again takes a microsecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from mmap import PAGESIZE
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

_PROCESS = Path("/proc/self")
_DONT_NEED = 4  # MADV_DONTNEED
_LINK_MAP = 2  # RTLD_DI_LINKMAP
_CLEAN = (0, 0b101)  # bits 61 to 63 of an entry of pagemap: no page, or a page that is present and a file's


def drop_code() -> None:
    """Drops the unchanged read-only pages of the libraries beside torch. Has an effect on Linux only.

    Does nothing where /proc or the C library does not tell what is mapped.
    """
    if sys.platform != "linux":
        return
    folder = os.fsencode(Path(torch.__file__).resolve().parents[1]) + b"/"
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with _held_open(libc, folder) as first_addresses:
            for first, end in list(unchanged_pages(first_addresses)):
                libc.madvise(first, end - first, _DONT_NEED)


@contextlib.contextmanager
def _held_open(libc: ctypes.CDLL, folder: bytes) -> Iterator[set[int]]:
    """Yields the addresses at which the libraries in ``folder`` begin that this process has loaded.

    ``dlopen`` waits until another thread's ``dlopen`` of a library is done. The handle keeps the library mapped, so
    that no other memory takes its place meanwhile. These calls release the interpreter's lock while they wait.
    """
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    libc.dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    libc.dlclose.argtypes = (ctypes.c_void_p,)
    paths = {mapping.path for mapping in _mappings() if mapping.path.startswith(folder) and b".so" in mapping.path}
    handles = [libc.dlopen(path, os.RTLD_LAZY | os.RTLD_NOLOAD) for path in paths]
    try:
        yield {_first_address(libc, handle) for handle in handles if handle}
    finally:
        for handle in handles:
            if handle:
                libc.dlclose(handle)


def _first_address(libc: ctypes.CDLL, handle: int) -> int:
    link_map = ctypes.POINTER(ctypes.c_size_t)()
    failed = libc.dlinfo(handle, _LINK_MAP, ctypes.byref(link_map))
    return 0 if failed else link_map[0]  # l_addr, the first field of struct link_map


def unchanged_pages(first_addresses: set[int]) -> Iterator[tuple[int, int]]:
    """Yields the read-only mappings of the files that are mapped from these addresses on: each one's first and end.

    Mappings with private copies of pages (anonymous or swapped out) are skipped: no file holds their contents.
    """
    with (_PROCESS / "pagemap").open("rb") as pagemap:
        for _, group in groupby(_mappings(), key=lambda mapping: mapping.path):
            library = list(group)
            if library[0].first not in first_addresses:
                continue
            for first, end, access, _ in library:
                pagemap.seek(8 * (first // PAGESIZE))
                pages = (end - first) // PAGESIZE
                kinds = np.frombuffer(pagemap.read(8 * pages), np.uint64) >> np.uint64(61)
                clean = len(kinds) == pages and np.isin(kinds, _CLEAN).all()
                if clean and access in (b"r-xp", b"r--p"):
                    yield first, end


class _Mapping(NamedTuple):
    first: int
    end: int
    access: bytes
    path: bytes


def _mappings() -> list[_Mapping]:
    """Returns this process's mappings in the order of their addresses."""
    mappings = []
    for line in (_PROCESS / "maps").read_bytes().splitlines():
        addresses, access, _, _, _, *path = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split(b"-"))
        mappings.append(_Mapping(first, end, access, path[0] if path else b""))
    return mappings
