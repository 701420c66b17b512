"""Starts and stops a server process by its pid, and reads from /proc what its processes use.

On a system without /proc, the usage is left out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_MIB = 2**20
_STOP_S = 30.0
_SAMPLE_S = 0.25


def family(pid: int) -> list[int]:
    """Returns the pids of the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def cpu_seconds(pid: int) -> float:
    """Returns the user and system CPU seconds of the process and all its descendants."""
    ticks = 0
    for each in family(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def rss_mib(pids: Sequence[int]) -> float:
    """Sums resident memory over processes; a page that several of them share counts for each."""
    total = 0
    for each in pids:
        with suppress(OSError):
            resident_pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
            total += resident_pages * os.sysconf("SC_PAGE_SIZE")
    return total / _MIB


def available_mib() -> float:
    """Returns the memory that programs can still allocate; infinity if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable"))


class Usage:
    """Measures a server's CPU seconds and peak memory while a block runs, and the CPU seconds of this client."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids = family(pid)
        self._peak = 0.0
        self._sampler: asyncio.Task[None] | None = None
        self._began = (0.0, 0.0)

    async def __aenter__(self) -> Usage:
        self._began = (cpu_seconds(self._pid), _own_cpu())
        self._sampler = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._sampler is not None
        self._sampler.cancel()
        with suppress(asyncio.CancelledError):
            await self._sampler
        self._look()
        server, client = cpu_seconds(self._pid), _own_cpu()
        self.figures = {
            "cpu_s": server - self._began[0],
            "client_cpu_s": client - self._began[1],
            "rss_mib": self._peak,
        }

    async def _sample(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_SAMPLE_S)

    def _look(self) -> None:
        self._peak = max(self._peak, rss_mib(self._pids))


def _own_cpu() -> float:
    times = os.times()
    return times.user + times.system


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
    """Starts the process in its own session, so that the processes it starts end with it."""
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


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates the process, then kills whatever is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_S)
