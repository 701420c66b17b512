"""Processes that a handler starts end with its worker, however that ends, even in their own sessions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from tests.torchserve.workshop import ask, outcome, request, run, running, until, write_handler

_STARTS = """
import ctypes, os, subprocess, time

DAEMON = ["setsid", "--fork", "sh", "-c", "echo $$; exec sleep 300 >&-"]  # a child of a process that has ended

def handle(data, context):
    if data is None:
        return None
    what = data[0]["body"].decode()
    if what == "start":
        session = subprocess.Popen(["sleep", "300"], start_new_session=True)
        daemon = subprocess.Popen(DAEMON, stdout=subprocess.PIPE, text=True)
        pid = int(daemon.stdout.readline())
        daemon.wait()
        open("pids.new", "w").write(f"{session.pid} {pid} {os.getpid()}")
        os.rename("pids.new", "pids")
    elif what == "orphans":
        for _ in range(20):
            subprocess.run(["sh", "-c", "sleep 0 & exit"])
        time.sleep(0.5)
    elif what == "crash":
        os._exit(9)
    elif what == "hang":
        ctypes.PyDLL(None).sleep(300)  # with the interpreter's lock: no thread of the worker runs
    return ["done"]
"""


async def _started(pool: WorkerPool, folder: Path) -> list[psutil.Process]:
    assert await ask(pool, "start") == ["done"]
    found = [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]
    assert all(each.is_running() for each in found) and len({os.getsid(each.pid) for each in found}) == 3
    return found


def _gone(started: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(started, timeout=20)
    for each in alive:
        each.kill()
    assert not alive


def test_processes_in_sessions_of_their_own_end_when_the_model_is_unloaded(tmp_path: Path) -> None:
    async def scenario() -> list[psutil.Process]:
        async with running(write_handler(tmp_path, _STARTS)) as pool:
            return await _started(pool, tmp_path)

    _gone(run(scenario()))


@pytest.mark.long
@pytest.mark.parametrize("what", ["crash", "hang"])
def test_they_end_before_a_worker_that_has_crashed_or_hangs_is_started_again(tmp_path: Path, what: str) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _STARTS, {"responseTimeout": 2})) as pool:
            started = await _started(pool, tmp_path)
            assert isinstance(await outcome(pool.submit(request(what))), Exception)
            await until(lambda: not any(each.is_running() for each in started))
            assert await ask(pool, "again") == ["done"]

    run(scenario())


_SERVER = """
import asyncio, sys
from tests.torchserve.workshop import ask, request, running

async def main(uri, then):
    async with running(uri) as pool:
        await ask(pool, "start")
        if then:
            pool.submit(request(then))
        await asyncio.sleep(0.3)
        print("started", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("then", ["", "hang"])
def test_they_end_with_a_server_that_is_killed(tmp_path: Path, then: str) -> None:
    uri = write_handler(tmp_path, _STARTS)
    command = [sys.executable, "-c", _SERVER, uri, then]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()
            started = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        finally:
            server.kill()
    _gone(started)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_with_its_supervisor_and_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    """A supervisor killed by SIGKILL cannot end anything; the kernel then ends only the worker."""

    async def scenario() -> list[psutil.Process]:
        async with running(write_handler(tmp_path, _STARTS)) as pool:
            *others, worker = await _started(pool, tmp_path)
            (supervisor,) = pool.supervisor.slots[0].worker.pids  # type: ignore[union-attr]
            os.kill(supervisor, number)
            await until(lambda: pool.supervisor.restarts == 1 and len(pool.supervisor.ready) == 1)
            assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE  # which is another's to reap
            assert await ask(pool, "again") == ["done"]
            return others

    others = run(scenario())
    if number == signal.SIGKILL:
        for each in others:
            each.kill()
    _gone(others)


def test_processes_that_end_after_their_parents_leave_no_zombies(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _STARTS)) as pool:
            assert await ask(pool, "orphans") == ["done"]
            (supervisor,) = pool.supervisor.slots[0].worker.pids  # type: ignore[union-attr]
            await until(lambda: len(psutil.Process(supervisor).children(recursive=True)) == 1)

    run(scenario())


# The first request is answered with the modules that were imported after the worker had said that it is ready.
_LATE_IMPORTS = """
import json, sys

at_ready = set()

def note(context):
    send = context.metrics._channel.send

    def noted(kind, **fields):
        if kind == "ready":
            at_ready.update(sys.modules)
        send(kind, **fields)

    context.metrics._channel.send = noted

class Handler:
    def initialize(self, context):
        note(context)

    DEF handle(self, data, context):
        return [json.dumps([sorted(set(sys.modules) - at_ready), "torch" in at_ready])] * len(data)
"""


@pytest.mark.parametrize(
    ("which", "config"),
    [
        pytest.param("package", {}, marks=pytest.mark.long),
        ("shim", {}),
        ("shim", {"continuousBatching": True}),
        ("shim", {"asyncCommunication": True}),
    ],
)
def test_a_worker_that_is_ready_imports_nothing_for_its_first_request(
    tmp_path: Path, which: str, config: dict[str, Any]
) -> None:
    source = _LATE_IMPORTS.replace("DEF", "async def" if "asyncCommunication" in config else "def")

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, config), which) as pool:
            late, with_torch = json.loads("".join(await ask(pool)))
        assert late == []
        assert with_torch == (which == "package")

    run(scenario())


def test_a_package_of_torchserve_that_cannot_be_used_fails_the_load_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: no such file')")

    async def scenario() -> None:
        with pytest.raises(LoadFailed, match="package cannot be used: OSError: libtorch_cpu"):
            async with running(write_handler(tmp_path, "def handle(data, context): return data"), "package"):
                pass

    run(scenario())
