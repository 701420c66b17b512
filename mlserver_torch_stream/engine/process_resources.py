"""How the models of one process share its memory, its cores, and their weights.

Knows nothing of models: promises of bytes, turns, and things that are made once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlserver_torch_stream.engine.loading.host_limits import default_kv_budget
from mlserver_torch_stream.engine.loading.shared_pool import SharedPool
from mlserver_torch_stream.engine.step_progress import StepProgress


class ProcessResources:
    """The one place where engines of a process learn of each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[object, int] = {}
        self.cores = FairLock()
        self.recorders = FairLock()  # of CUDA graphs: torch wants one at a time, and no memory given back meanwhile
        self.weights: SharedPool[Any] = SharedPool()
        self.engines: SharedPool[Any] = SharedPool()

    def promise(self, owner: object, asked: int | None, available: int, engines: int = 1) -> int:
        """Bytes of KV cache on the host for ``owner``: what it asked for, else half of what nobody was promised.

        That half is for ``engines`` of its kind.
        """
        with self._lock:
            free = max(0, available - sum(self._promised.values()))
            self._promised[owner] = default_kv_budget(free, engines) if asked is None else asked
            return self._promised[owner]

    def release(self, owner: object) -> None:
        with self._lock:
            self._promised.pop(owner, None)


class FairLock:
    """A lock that is handed on in the order of asking, so that engines on the same cores step in turn.

    Two OpenMP pools that spin on the same cores slow each other tenfold (measured); a plain lock would let a busy
    engine take it again before the waiting one wakes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False
        self.progress: StepProgress | None = None  # of the engine whose turn it is

    @contextmanager
    def turn(self, progress: StepProgress | None = None) -> Iterator[None]:
        """``progress``: what the holder is at, for the engines that wait."""
        self._acquire()
        self.progress = progress
        try:
            yield
        finally:
            self.progress = None
            self._release()

    def pass_on(self) -> None:
        """In the middle of a turn: lets those who wait have theirs."""
        progress, self.progress = self.progress, None
        self._release()
        self._acquire()
        self.progress = progress

    def _acquire(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def _release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


PROCESS = ProcessResources()
