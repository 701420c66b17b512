"""Divides the memory and the cores of a process among its models, and lets them share weights and engines.

Knows nothing of models: it holds promised bytes, locks, and objects that are made once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.engine.loading.host_limits import default_kv_budget
from mlserver_torch_stream.engine.loading.shared_pool import SharedPool
from mlserver_torch_stream.engine.step_progress import StepProgress
from mlserver_torch_stream.engine.text.text_process import TextProcesses

if TYPE_CHECKING:  # it imports torch, which servers without an engine need not have
    from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture


class ProcessResources:
    """What the engines of a process share: promised host memory, locks, pools, and processes that render templates."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[object, int] = {}
        self.cpu_lock = FairLock()
        # torch captures one CUDA graph at a time, and no memory may be given back during a capture.
        self.capture_lock = FairLock()
        self.capture_on: Callable[[str], GraphCapture | None] | None = None  # None: that of ``graph_capture``
        self.weights: SharedPool[Any] = SharedPool()
        self.engines: SharedPool[Any] = SharedPool()
        self.templates = TextProcesses()  # render the chat templates of all models

    def promise(self, owner: object, asked: int | None, available: int, engines: int = 1) -> int:
        """Promises ``owner`` host memory for its KV cache and returns the bytes: ``asked``, or a default.

        The default is half of the memory that is not promised yet, divided among ``engines`` of the same kind.
        """
        with self._lock:
            free = max(0, available - sum(self._promised.values()))
            self._promised[owner] = default_kv_budget(free, engines) if asked is None else asked
            return self._promised[owner]

    def release(self, owner: object) -> None:
        with self._lock:
            self._promised.pop(owner, None)


class FairLock:
    """A lock that threads get in the order in which they ask, so that engines on the same cores step in turn.

    Two OpenMP pools that spin on the same cores slow each other tenfold (measured). With a plain lock a busy engine
    takes the lock again before a waiting engine wakes up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False
        self.progress: StepProgress | None = None  # of the engine that holds the lock

    @contextmanager
    def held_by(self, progress: StepProgress) -> Iterator[bool]:
        """Holds the lock, and yields whether another thread had it.

        In ``progress`` the engines that wait for the lock see how long the holder's step takes.
        """
        with self as waited:
            self.progress = progress
            try:
                yield waited
            finally:
                self.progress = None

    def __enter__(self) -> bool:
        """Returns whether another thread had the lock."""
        with self._lock:
            if not self._held:
                self._held = True
                return False
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()
        return True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def yield_turn(self) -> None:
        """Releases the lock, which the caller holds, and takes it again after all waiting threads."""
        progress, self.progress = self.progress, None
        self.__exit__()
        self.__enter__()
        self.progress = progress


PROCESS = ProcessResources()
