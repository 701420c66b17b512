"""Other processes in tests: waits with a limit, whether a process runs, and which ranks one has started."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str = "the condition", seconds: float = 30.0) -> None:
    """Waits until the condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Returns whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def child_pids(parent: int) -> list[int]:
    """Returns the pids of the processes that this process has started; its threads may end meanwhile."""
    found: list[int] = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def rank_pids(parent: int) -> list[int]:
    """Returns the pids of the ranks that this process has started."""
    found = []
    for each in child_pids(parent):
        with suppress(OSError):
            if b"engine.rank_main" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found
