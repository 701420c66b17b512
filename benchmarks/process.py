"""Starts and stops a server process, and measures the CPU time and memory of a process and its descendants."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_STOP_S = 30.0
_SAMPLE_S = 0.25


def family(pid: int) -> list[Any]:
    """Returns the process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds, user and system, of a process and its descendants."""
    return _sum(family(pid), lambda each: sum(each.cpu_times()[:2]))


def rss_mib(processes: Sequence[Any]) -> float:
    """Returns the memory of all processes; pages that they share count once for each."""
    return _sum(processes, lambda each: each.memory_info().rss) / 2**20


def anonymous_mib(processes: Sequence[Any]) -> float:
    """Returns the memory of all processes without pages of files, which the kernel can read again."""
    return _sum(processes, _anonymous) / 2**20


def _anonymous(process: Any) -> float:
    """Returns the bytes of anonymous and shared memory; Linux alone tells pages of files apart."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return float(process.memory_info().rss)
    return sum(float(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.M)) * 1024


def forget(paths: Iterable[Path]) -> None:
    """Drops the pages of these files, and of all files in these folders, from the page cache, as after a restart."""
    os.sync()
    for file in (file for path in paths for file in (path, *path.rglob("*")) if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sum(processes: Sequence[Any], figure: Callable[[Any], float]) -> float:
    total = 0.0
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            total += figure(each)
    return total


class Usage:
    """Measures a server's CPU seconds and peak memory while a block runs, and the CPU seconds of this client."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._processes = family(pid)
        self._peak = self._anonymous = 0.0
        self._sampler: asyncio.Task[None] | None = None
        self._began = (0.0, 0.0)

    async def __aenter__(self) -> Usage:
        self._began = (cpu_seconds(self._pid), time.process_time())
        self._sampler = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._sampler is not None
        self._sampler.cancel()
        with suppress(asyncio.CancelledError):
            await self._sampler
        self._look()
        server, client = cpu_seconds(self._pid), time.process_time()
        self.figures = {
            "cpu_s": server - self._began[0],
            "client_cpu_s": client - self._began[1],
            "rss_mib": self._peak,
            "anonymous_mib": self._anonymous,
        }

    async def _sample(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_SAMPLE_S)

    def _look(self) -> None:
        self._peak = max(self._peak, rss_mib(self._processes))
        self._anonymous = max(self._anonymous, anonymous_mib(self._processes))


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process in its own session, so that the processes it starts end with it. They also end if this
    program gets SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,
            )
        try:
            yield process
        finally:
            _stop(process)
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates the process, then kills whatever is left of its process group. A signal shortens the wait.

    Waits for all of them, because the next server needs their memory.
    """
    started: list[Any] = []
    with suppress(psutil.NoSuchProcess):
        started = family(process.pid)[1:]
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_S)
    psutil.wait_procs(started, _STOP_S)
