"""Code that only the load has used leaves the memory of the process; what it has changed stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.loading import code_pages
from mlserver_torch_stream.engine.loading.code_pages import unchanged_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_DROPPED = """
import torch
from mlserver_torch_stream.engine.loading.code_pages import drop_code

def of_files():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssFile"))

x = torch.arange(4096, dtype=torch.float32).reshape(64, 64) / 4096
expected, before = torch.softmax(x @ x, 1), of_files()
drop_code()
freed = before - of_files()
assert torch.equal(torch.softmax(x @ x, 1), expected)
print(freed)
"""
_READ_ONLY, _READ_WRITE = 1, 3


def test_code_of_imports_is_dropped_and_runs_afterwards() -> None:
    run = subprocess.run([sys.executable, "-c", _DROPPED], capture_output=True, text=True, check=True, timeout=120)
    assert int(run.stdout) > 20 * 2**20


def test_pages_that_the_process_has_changed_are_left_out(tmp_path: Path) -> None:
    """As the linker leaves them: written once, and then made read-only."""
    addresses = {}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for name in ("read.so", "changed.so", "unread.so", "elsewhere.so"):
        path = tmp_path / name
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("rb") as file:
            private = mmap.MAP_PRIVATE
            address = libc.mmap(None, mmap.PAGESIZE, _READ_WRITE, private, file.fileno(), ctypes.c_long(0))
        if name != "unread.so":
            ctypes.string_at(address, 1)
        if name == "changed.so":
            ctypes.memset(address, 1, 1)
        libc.mprotect(address, mmap.PAGESIZE, _READ_ONLY)
        addresses[name] = address
    try:
        asked = {addresses[name] for name in ("read.so", "changed.so", "unread.so")}
        expected = {(addresses[name], addresses[name] + mmap.PAGESIZE) for name in ("read.so", "unread.so")}
        assert set(unchanged_pages(asked)) == expected
    finally:
        for address in addresses.values():
            libc.munmap(address, mmap.PAGESIZE)


def test_files_that_are_mapped_but_are_no_loaded_libraries_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"no_library_\xff.so")).write_bytes(bytes(mmap.PAGESIZE))
    (file,) = tmp_path.iterdir()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[0] == 0
        with code_pages._held_open(ctypes.CDLL(None), os.fsencode(tmp_path)) as first_addresses:
            assert first_addresses == set()


def test_without_proc_nothing_is_dropped_and_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(code_pages, "_PROCESS", tmp_path)
    code_pages.drop_code()
