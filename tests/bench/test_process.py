"""The processes that a benchmark starts end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import alive, wait_until

_ROOT = Path(__file__).parents[2]
# Starts a process and a child of that process, prints their pids, and waits as a benchmark does.
_BENCHMARK = """
import asyncio, sys, time
from pathlib import Path
import uvloop
from benchmarks.process import running

folder = Path(sys.argv[1])
with running(["sh", "-c", "sleep 600 & echo $$ $!; wait"], {}, folder / "log", folder):
    while len((folder / "log").read_text().split()) < 2:
        time.sleep(0.01)
    print((folder / "log").read_text(), flush=True)
    uvloop.run(asyncio.sleep(600)) if sys.argv[2] == "loop" else time.sleep(600)
"""


@pytest.mark.parametrize("wait", ["loop", "blocked"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_a_benchmark_ends_what_it_has_started(
    number: signal.Signals, wait: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _BENCHMARK, str(tmp_path), wait]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as benchmark:
        assert benchmark.stdout is not None
        pids = [int(word) for word in benchmark.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        benchmark.send_signal(number)
        assert benchmark.wait(60) == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT}[number]
    wait_until(lambda: not any(map(alive, pids)), "the end of what it has started")
