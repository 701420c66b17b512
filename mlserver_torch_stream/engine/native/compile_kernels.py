"""Compiles the kernels once for this machine's CPU, and keeps the library in the cache folder.

A full disk or an interrupted copy can leave a truncated library, which would kill the process with SIGBUS when it is
opened. So a library with a wrong checksum is removed and never opened.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.failures import Unsuitable
from mlserver_torch_stream.engine.kept_files import keep, keep_newest, kept_files
from mlserver_torch_stream.engine.stage_log import stage

logger = logging.getLogger(__name__)

MAX_LIBRARIES = 8  # in one cache folder: of a few versions of this package and kinds of CPU
SOURCES = Path(__file__).parent / "kernels"
THIS_CPU = ("-march=native",)
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
_ROOM = 4 * 2**20  # free bytes; a library takes half a MiB
_SECONDS = 600.0  # a compilation takes about 10 s on a quiet core

T = TypeVar("T")


class NoKernels(Unsuitable):
    """Raised if the kernels cannot be opened or compiled here; the message says why in one line."""


def compiled_library(
    cache_dir: Path,
    open_library: Callable[[Path], T],
    target: Sequence[str] = THIS_CPU,
    seconds: float = _SECONDS,
) -> T:
    """Returns the result of ``open_library`` for this compiler's library.

    Compiles the library if it is not in the cache. ``target`` are the compiler options that say which instructions it
    may use. If there is no compiler or it fails, a library of another compiler for the same sources and CPU is used. A
    compilation takes at most ``seconds``. Raises NoKernels; ``open_library`` also raises it if a library cannot be
    used.
    """
    folder, stem = cache_dir / "kernels", f"decoder-{_fingerprint(target)}"
    try:
        compiler = _compiler()
        own = f"{stem}-{_version(compiler)}"
        opened = _open_kept(folder, own, open_library)
        return _compile(compiler, target, folder, own, open_library, seconds) if opened is None else opened
    except NoKernels as error:
        opened = _open_kept(folder, stem, open_library)
        if opened is None:
            raise
        logger.info("The kernels in %s, which another compiler has made, are used: %s", folder, error)
        return opened


def _open_kept(folder: Path, stem: str, open_library: Callable[[Path], T]) -> T | None:
    for path in kept_files(folder, f"{stem}-*.so"):
        try:
            return open_library(path)
        except NoKernels as error:  # built for another C++ library, or removed just now
            logger.warning("%s cannot be used here: %s", path, error)
    return None


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoKernels("no C++ compiler")


@cache
def _version(compiler: str) -> str:
    return hashlib.sha256(f"{compiler} {_run([compiler, '--version'], _SECONDS)}".encode()).hexdigest()[:8]


def _fingerprint(target: Sequence[str]) -> str:
    """Returns a digest of a compilation's flags, CPU and sources, that is, of all its inputs except the compiler."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *target)).encode())
    digest.update(cpu_properties().encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def cpu_properties() -> str:
    """Returns the CPU properties that ``-march=native`` depends on, for machines that share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    described = [line for line in lines if line.partition(":")[0].strip() in names]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(described))])


def _compile(
    compiler: str, target: Sequence[str], folder: Path, stem: str, open_library: Callable[[Path], T], seconds: float
) -> T:
    """Compiles a library, opens it, and then moves it to the cache, where others could replace or remove it."""
    with _workplace(folder) as place:
        made = Path(place, "decoder.so")
        with stage(logger, f"Compiling the kernels for this CPU with {compiler}"):
            _run([compiler, *_FLAGS, *target, str(SOURCES / "library.cpp"), "-o", str(made)], seconds)
        opened = open_library(made)
        if made.parent.parent == folder and keep(made, folder, stem) is not None:
            with suppress(OSError):  # another process removes a file at this moment
                keep_newest(folder, "*.so", MAX_LIBRARIES)
    return opened


def _workplace(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Returns a folder beside the kept libraries (a rename can move a library there), or else a temporary folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) >= _ROOM:
            return tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-")
        why = f"the disk of the cache folder {folder} has only {format_bytes(free)} free"
    except OSError as error:
        why = f"the cache folder {folder} cannot be written: {error.strerror}"
    try:
        place = tempfile.TemporaryDirectory(prefix="mlserver-torch-stream-")
    except OSError:
        raise NoKernels(why) from None
    logger.warning("The kernels are compiled for this start only: %s", why)
    return place


def _run(command: list[str], seconds: float) -> str:
    """Runs the compiler and returns its output. Raises NoKernels if the compiler fails."""
    compiler = command[0]
    try:
        # The compiler gets its own session, so that a timeout also ends the processes that it starts, such as cc1plus.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise NoKernels(f"the compiler {compiler} cannot be started: {error.strerror}") from None
    with process:
        try:
            printed, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise NoKernels(f"the compiler {compiler} took more than {seconds:g} s") from None
    status = process.returncode
    if status:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        said = [line.strip() for line in complaints.splitlines() if line.strip()]
        errors = [line for line in said if "error" in line or "failed" in line]  # the linker's reason has no "error"
        message = next(iter((*errors, *said)), "it printed no error")
        raise NoKernels(f"the compiler {compiler} {how}: {message[:300]}")
    return printed
