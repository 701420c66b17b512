"""Compiles the kernels for this machine's CPU, once: the library is kept in the cache folder.

Knows nothing of what the kernels do.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "kernels"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
_SECONDS = 180  # takes 6 on a quiet core


class NoKernels(Exception):
    """The kernels cannot be had here; says why in one line."""


def compiled_library(cache_dir: Path) -> Path:
    """The shared library, compiled unless one for the same sources, compiler and CPU is there. Raises NoKernels."""
    compiler = _compiler()
    target = cache_dir / "kernels" / f"decoder-{_fingerprint(compiler)}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoKernels("no C++ compiler")


def _fingerprint(compiler: str) -> str:
    """Of everything that decides what the compiler would make."""
    digest = hashlib.sha256(" ".join((compiler, *_FLAGS)).encode())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_cpu().encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    described = [line for line in lines if line.partition(":")[0].strip() in names]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(described))])


def _compile(compiler: str, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target and renamed when whole: two processes may compile at once, the last one wins.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compiling-") as folder:
            made = Path(folder) / target.name
            _run([compiler, *_FLAGS, str(_SOURCES / "library.cpp"), "-o", str(made)])
            made.replace(target)
    except OSError as error:
        raise NoKernels(f"the cache folder cannot be written: {error}") from None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoKernels(f"the compiler took more than {_SECONDS} s") from None
    if done.returncode != 0:
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise NoKernels(f"the compiler failed: {message[:300]}")
    return done.stdout
