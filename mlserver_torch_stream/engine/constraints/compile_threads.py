"""Runs compilations, a few at a time, each on a thread of its own with a deep stack, which ends with the process.

Knows nothing of what is compiled. The library calls itself for each part within a part, and for each reference: the
longest source that is taken needs up to 64 MB of stack, and without them ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

_T = TypeVar("_T")
_THREADS = 2
_STACK_BYTES = 2**28  # of address space; memory is taken as it is needed
_NICER_BY = 10  # a tenth of the share that other threads have of a busy core


class CompileThreads(Generic[_T]):
    """No thread is waited for when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[_T], Callable[[], _T]]] = deque()
        self._running = 0

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Begins ``work`` when a thread is free. A future that is cancelled before never begins."""
        future: Future[_T] = Future()
        with self._lock:
            self._waiting.append((future, work))
            if self._running < _THREADS:
                try:
                    threading.Thread(target=self._one_by_one, name="constraint-compilations", daemon=True).start()
                except RuntimeError:  # the system has no further thread
                    self._waiting.pop()
                    raise
                self._running += 1
        return future

    def _one_by_one(self) -> None:
        """A thread that has given way cannot take that back, nor can one that it starts: so each work has its own."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, work = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    thread = _started(partial(finish, future, work))
                except RuntimeError as error:  # the system has no further thread
                    future.set_exception(error)
                    continue
            thread.join()


def give_way() -> None:
    """Lets other threads go first from here on, where the system can say so of one thread: on Linux.

    For work without the interpreter's lock: others that wait for the lock must not wait for a thread that gives way.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY)


def finish(future: Future[_T], work: Callable[[], _T]) -> None:
    """Runs the work, and gives the future what came of it."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _started(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="constraint-compiler", daemon=True)
    threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(0)
    return thread
