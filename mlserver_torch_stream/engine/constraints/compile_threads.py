"""Runs compilations one after the other on a few threads, whose stacks are deep and which end with the process.

Knows nothing of what is compiled. The library calls itself for each part within a part, and for each reference: the
longest source that is taken needs up to 64 MB of stack, and without them ends the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_T = TypeVar("_T")
_THREADS = 2
_STACK_BYTES = 2**28  # of address space; memory is taken as it is needed


class CompileThreads(Generic[_T]):
    """Its threads end when nothing is left to do. No thread is waited for when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[_T], Callable[[], _T]]] = deque()
        self._running = 0

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Begins ``work`` when a thread is free. A future that is cancelled before never begins."""
        future: Future[_T] = Future()
        with self._lock:
            if self._running < _THREADS:
                self._start()
                self._running += 1
            self._waiting.append((future, work))
        return future

    def _start(self) -> None:
        threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="constraint-compiler", daemon=True).start()
        finally:
            threading.stack_size(0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                finish(future, work)


def finish(future: Future[_T], work: Callable[[], _T]) -> None:
    """Runs the work, and gives the future what came of it."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
