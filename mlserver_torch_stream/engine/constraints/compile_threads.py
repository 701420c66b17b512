"""Runs compilations in daemon threads with deep stacks, a few at a time.

Knows nothing of what is compiled. The library recurses for each part within a part, and for each reference: the longest
source that is accepted needs up to 64 MB of stack, and a smaller stack ends the process.
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
_NICE_LEVELS = 10  # the thread gets about a tenth of a busy core


class CompileThreads(Generic[_T]):
    """At its end the process does not wait for these threads."""

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
        """Runs the waiting work, each in a new thread, as ``lower_priority`` holds for the rest of its thread."""
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


def lower_priority() -> None:
    """Lowers the priority of the calling thread for good, on Linux: other systems have none for a single thread.

    The thread must not hold the interpreter's lock for long: the threads that wait for the lock would wait for it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE_LEVELS)


def finish(future: Future[_T], work: Callable[[], _T]) -> None:
    """Runs the work, and gives the future its result or its error."""
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
