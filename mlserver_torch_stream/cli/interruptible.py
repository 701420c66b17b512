"""Ends a command at a signal, also while one of its threads runs a call that cannot be stopped, such as a load."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from mlserver_torch_stream.cloud.store import settle
from mlserver_torch_stream.work_threads import at_work, in_thread

T = TypeVar("T")


class Interrupted(Exception):
    """A signal ended the command."""


class LeftBehind(Exception):
    """A signal ended the command while a thread ran that cannot be stopped. The process has to end by ``leave``."""


def run_to_end(work: Awaitable[T]) -> T:
    """Runs ``work`` on a loop of its own; SIGINT and SIGTERM cancel it. Raises Interrupted or LeftBehind."""

    async def guarded() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            raise Interrupted from None
        finally:
            left = at_work()
            for number in signals:
                loop.remove_signal_handler(number)
                if left:
                    signal.signal(number, signal.SIG_IGN)  # a second signal must not break the end of the process
            await settle()
            # This replaces any other exception, such as one of a second signal. The end of an
            # interpreter unwinds the thread out of C++, which aborts the process.
            if left:
                raise LeftBehind

    return asyncio.run(guarded())


async def in_a_thread(call: Callable[[], T]) -> T:
    """Does what asyncio.to_thread does, except that a cancellation raises LeftBehind without a wait for the thread."""
    try:
        return await in_thread(call)
    except asyncio.CancelledError:
        raise LeftBehind from None


def leave(status: int) -> NoReturn:
    """Ends the process and its children while its threads still run: the interpreter's normal end would wait for them,
    or free memory that they use."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(status)


def _descendants(pid: int) -> list[int]:
    """The pids of the process's children and of theirs. Empty on systems without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for each in found:  # the list grows in this loop
        found.extend(children.get(each, ()))
    return found
