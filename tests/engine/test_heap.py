"""Memory that a load has freed is returned to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FREED = """
import ctypes, os
from mlserver_torch_stream.engine.machine import trim_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the heap's top where it is
    libc.free(block)
before = resident()
trim_heap()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps free blocks so")
def test_free_blocks_below_one_in_use_are_given_back() -> None:
    freed = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True, timeout=60)
    assert int(freed.stdout) > 90_000_000
