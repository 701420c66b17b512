"""What a server process holds, seen from outside, and whether it grows.

Reads /proc, and counts the event loop's tasks with the model ``census`` on the same server.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import plain_http
from tests.reliability import census
from tests.server.harness import Model, Server

MIB = 2**20
CENSUS = Model("census", None, implementation="census.Census")
PYTHON_PATH = f"{Path(census.__file__).parent}:{Path(__file__).parents[2]}"


@dataclass(frozen=True)
class Usage:
    rss: int
    descriptors: int
    threads: int
    tasks: int


def rss_of(server: Server) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def usage_of(server: Server) -> Usage:
    folder = Path(f"/proc/{server.process.pid}")
    tasks = sum(tasks_of(server).values())
    return Usage(rss_of(server), len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())), tasks)


def tasks_of(server: Server) -> dict[str, int]:
    """Returns the number of tasks by the name of their coroutine."""
    response = plain_http.post(f"{server.url}/v2/models/census/infer", json={"inputs": []}, timeout=30)
    lines = [line.split() for line in response.raise_for_status().json()["outputs"][0]["data"]]
    return {kind: int(count) for count, kind in lines}


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Returns the slope of the straight line that fits best."""
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - middle_x) ** 2 for x in xs)
