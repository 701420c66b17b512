"""Compiles the kernels once for this machine's CPU, and keeps the library in the cache folder.

A full disk or an interrupted copy can leave a truncated library, which would kill the process with SIGBUS when it is
opened. So a library with a wrong checksum is removed and never opened.
"""

from __future__ import annotations

import atexit
import errno
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

from torch import Tensor

from mlserver_torch_stream.engine.failures import Unsuitable
from mlserver_torch_stream.engine.kept_files import keep, keep_newest, kept_files, replaceable
from mlserver_torch_stream.engine.mapped_file import map_file
from mlserver_torch_stream.engine.stage_log import stage

logger = logging.getLogger(__name__)

MAX_LIBRARIES = 8  # in one cache folder: of a few versions of this package and kinds of CPU
SOURCES = Path(__file__).parent / "kernels"
THIS_CPU = ("-march=native",)
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
_MIN_FREE_BYTES = 2**24  # a library has half a MiB
_SECONDS = 600.0  # a compilation takes about 10 s on a quiet core
_NOEXEC = getattr(os, "ST_NOEXEC", 0)  # macOS does not tell

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
        opened, place = _open_kept(folder, own, open_library), folder
        if opened is None and (why := _unusable(folder)) is not None:
            place = _temporary(folder, why)
            opened = _open_kept(place, own, open_library)
        return _compile(compiler, target, place, own, open_library, seconds) if opened is None else opened
    except NoKernels as error:
        opened = _open_kept(folder, stem, open_library)
        if opened is None:
            raise
        logger.info("The kernels in %s, which another compiler has made, are used: %s", folder, error)
        return opened


def _open_kept(folder: Path, stem: str, open_library: Callable[[Path], T]) -> T | None:
    if _is_noexec(folder):
        return None
    for path in kept_files(folder, f"{stem}-*.so"):
        try:
            _hold(path, path.stat().st_ino)
            return open_library(path)
        except (NoKernels, OSError) as error:  # built for another C++ library, or removed just now
            logger.warning("%s cannot be used here: %s", path, error)
    return None


def _is_noexec(folder: Path) -> bool:
    """Returns whether the folder is on a file system that is mounted noexec, so that no library can be opened there."""
    try:
        return bool(os.statvfs(folder).f_flag & _NOEXEC)
    except OSError:  # it does not exist
        return False


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
    """Compiles a library, opens it, and then moves it to ``folder``, where others could replace or remove it."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as place:
        made = Path(place, "decoder.so")
        with stage(logger, f"Compiling the kernels for this CPU with {compiler}"):
            _run([compiler, *_FLAGS, *target, str(SOURCES / "library.cpp"), "-o", str(made)], seconds)
        # A library that another process has made meanwhile must not be replaced: that process has it open.
        if (other := _open_kept(folder, stem, open_library)) is not None:
            return other
        opened = open_library(made)
        if (kept := keep(made, folder, stem)) is not None:
            with suppress(OSError):  # another process has just removed it
                _hold(kept, kept.stat().st_ino)
            keep_newest(folder, "*.so", MAX_LIBRARIES)
    return opened


@cache
def _hold(library: Path, inode: int) -> Tensor:
    """Holds a library until this process ends: an opened library stays mapped, and later loads open the file again.

    Without the file they would need a compiler. ``inode`` distinguishes a library from an older one of that name.
    """
    return map_file(library, locks=True)


def _unusable(folder: Path) -> str | None:
    """Returns why no library can be compiled or opened in this folder, or could be replaced there before that."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _is_noexec(folder):
            return f"{folder} is on a file system that is mounted noexec; set cache_dir to a folder on another one"
        if shutil.disk_usage(folder).free < _MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-").cleanup()
        return None if (who := replaceable(folder)) is None else f"a library in {folder} would not be used: {who}"
    except OSError as error:
        return f"the cache folder {folder} cannot be written: {error.strerror}"


@cache
def _temporary(folder: Path, why: str) -> Path:
    """Makes a folder that replaces the unusable ``folder`` until this process ends. Raises NoKernels."""
    try:
        if _is_noexec(Path(tempfile.gettempdir())):
            raise NoKernels(f"{why}, and the temporary folder {tempfile.gettempdir()} is mounted noexec, too")
        place = Path(tempfile.mkdtemp(prefix="mlserver-torch-stream-"))
    except OSError:
        raise NoKernels(why) from None
    atexit.register(shutil.rmtree, place, ignore_errors=True)
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
