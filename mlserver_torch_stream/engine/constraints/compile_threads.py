"""Compiles constraints, one to three at a time, on daemon threads with large stacks.

The library llguidance recurses for each nested part and each reference. The longest source that is accepted needs up to
64 MB of stack; on a smaller stack the process would crash.

The threads have normal priority. A thread of lower priority takes the interpreter lock when it returns from the
library. On a busy machine it may then get no core, while all other threads wait for the lock. Measured on 2026-11-23
with a nice value of 10: streams stopped for 0.2 to 0.5 s, and a compilation took five times as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_T = TypeVar("_T")
_MAX_THREADS = 2
_SPARE_AFTER_S = 1.0  # most constraints take some milliseconds, the slowest that are not refused ten seconds
_STACK_BYTES = 2**28  # a thread's address space for its stack; only used pages take memory


class Compilation(Future[_T]):
    """The future result of a compilation. ``begun`` is done once a thread has started the compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Future[None] = Future()


def threads_for(cores: int) -> int:
    """Returns how many constraints are compiled at a time.

    If there are several cores, the streams keep one of them, except while the spare thread compiles.
    """
    return max(1, min(_MAX_THREADS, cores - 1))


class CompileThreads(Generic[_T]):
    """Runs at most ``threads`` threads, and a spare thread that compiles if they have started nothing for a second.

    The process can end while these threads run.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: dict[Compilation[_T], Callable[[], _T]] = {}
        self._running = 0
        self._has_spare = False
        self._begun = 0  # compilations, except those in the spare thread

    def submit(self, work: Callable[[], _T]) -> Compilation[_T]:
        """Runs ``work`` when a thread is free. If the compilation is cancelled before that, it never starts.

        Raises RuntimeError if no thread runs and none can be started.
        """
        compilation: Compilation[_T] = Compilation()
        with self._lock:
            self._waiting[compilation] = work
            spare = self._running == self._threads
            if not (spare and self._has_spare):
                try:
                    self._start_thread(spare)
                except RuntimeError:
                    if not self._running:
                        del self._waiting[compilation]
                        raise
                else:
                    self._has_spare |= spare
                    self._running += not spare
        compilation.add_done_callback(self._forget)
        return compilation

    def _start_thread(self, spare: bool) -> None:
        threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._one_by_one, args=[spare], name="constraint-compiler", daemon=True).start()
        finally:
            threading.stack_size(0)

    def _one_by_one(self, spare: bool) -> None:
        seen = -1
        while True:
            with self._lock:
                compilation = next(iter(self._waiting), None)
                if compilation is None:
                    self._has_spare &= not spare
                    self._running -= not spare
                    return
                held_up, seen = seen == self._begun, self._begun
                if takes := held_up or not spare:
                    work = self._waiting.pop(compilation)
                    self._begun += not spare
            if not takes:
                time.sleep(_SPARE_AFTER_S)
            elif compilation.set_running_or_notify_cancel():
                if compilation.begun.set_running_or_notify_cancel():
                    compilation.begun.set_result(None)
                finish(compilation, work)

    def _forget(self, compilation: Future[_T]) -> None:
        assert isinstance(compilation, Compilation)
        with self._lock:
            self._waiting.pop(compilation, None)


def finish(future: Future[_T], work: Callable[[], _T]) -> None:
    """Runs ``work``, and sets its result or its error in the future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
