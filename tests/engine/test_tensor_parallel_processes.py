"""The processes of ranks: which ends with which, by the kernel or by a pipe, and who waits for whom, for how long."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlserver_torch_stream.engine import machine
from mlserver_torch_stream.engine.tensor_parallel import rendezvous
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import RankProcesses
from mlserver_torch_stream.errors import LoadFailed
from tests.waiting import alive, wait_until

# Its children are tied to it and do nothing else: neither torch nor a group.
_QUICK = "keyword"  # a module whose process ends at once, by itself
_ROOT = Path(__file__).parents[2]
_LEADER = """
import sys, time
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import RankProcesses
other_ranks = RankProcesses(3, 1, "tests.engine.tied")
print(*(child.process.pid for child in other_ranks._children), flush=True)
"""


def lead(ending: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Returns a process, and the pids of its two children, which must end when it ends."""
    process = subprocess.Popen([sys.executable, "-c", _LEADER + ending], stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.long
@pytest.mark.parametrize("ending", ["time.sleep(600)", "import os; os.kill(os.getpid(), 9)", "sys.exit(3)"])
def test_no_child_outlives_rank_0_however_that_ends(ending: str) -> None:
    process, pids = lead(ending)
    with process:
        assert len(pids) == 2
        if "sleep" in ending:
            time.sleep(0.2)
            assert all(alive(pid) for pid in pids)
            process.kill()
        process.wait(30)
        wait_until(lambda: not any(alive(pid) for pid in pids), "the children's end")


@pytest.mark.long
def test_the_end_of_the_thread_that_loads_is_not_the_end_of_the_children() -> None:
    """The kernel ties a child's life to the thread that started it, rather than to the process."""
    ending = """
import threading
more = []
thread = threading.Thread(target=lambda: more.append(RankProcesses(2, 1, "tests.engine.tied")))
thread.start(); thread.join()
time.sleep(0.5)
print(more[0].fate(0), flush=True)
other_ranks.end(0); more[0].end(0)
"""
    process, pids = lead(ending)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "None"
        assert process.wait(30) == 0
        wait_until(lambda: not any(alive(pid) for pid in pids), "the children's end")


def test_a_childs_end_is_told_at_once_and_later() -> None:
    other_ranks = RankProcesses(2, 1, _QUICK)
    assert other_ranks.fate(30) == "rank 1 ended with status 0"
    told: list[str] = []
    other_ranks.watch(told.append)
    assert told == ["rank 1 ended with status 0"]
    other_ranks.end(0)


def test_a_rank_that_ends_before_it_has_come_fails_the_load_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(LoadFailed, match="rank 1 ended with status 0"):
        rendezvous.form(2, {}, _QUICK)
    assert time.monotonic() - began < 60, "it waited for three minutes"


def test_a_launcher_that_started_another_number_of_ranks_is_told() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(LoadFailed, match="2 ranks are needed, but 3 were started"):
        rendezvous.form(2, environ)


def test_ranks_share_the_cores_of_their_machine() -> None:
    assert machine.ranks_here(4, {}) == 4
    launched = {"RANK": "0", "WORLD_SIZE": "4"}
    assert machine.ranks_here(4, {**launched, "LOCAL_WORLD_SIZE": "2"}) == 2
    assert machine.ranks_here(4, launched) == 1
