"""Holds what the engines of one process share: leased objects (one per key), reserved host memory, and locks."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from mlserver_torch_stream.engine.machine import default_kv_budget
from mlserver_torch_stream.engine.text.text_process import TextProcesses
from mlserver_torch_stream.engine.watchdog import FairLock
from mlserver_torch_stream.work_threads import WorkCancelled, raise_if_cancelled

V = TypeVar("V")

_LOOK_S = 0.1  # seconds between two looks of a load that waits


class SharedPool(Generic[V]):
    """Leases shared objects to threads, and makes each object only once: other threads that need the object wait."""

    def __init__(self) -> None:
        self.made = 0  # objects made so far, without failures
        self._lock = threading.Lock()
        self._shared: dict[Hashable, _Shared[V]] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def lease(self, key: Hashable, make: Callable[[], V]) -> Lease[V]:
        """Leases the object of ``key``.

        If ``make`` raises, all waiting threads raise the error; the next lease tries again. If the thread that makes
        the object is cancelled, one of the waiting threads makes it.
        """
        while True:
            with contextlib.suppress(WorkCancelled):
                return self._lease(key, make)
            raise_if_cancelled()

    def _lease(self, key: Hashable, make: Callable[[], V]) -> Lease[V]:
        with self._lock:
            shared = self._shared.get(key)
            makes = shared is None
            if shared is None:
                shared = self._shared[key] = _Shared()
            shared.users += 1
        if makes:
            self._make(key, shared, make)
        return Lease(shared.thing.result(), lambda: self._give_back(key, shared))

    def _make(self, key: Hashable, shared: _Shared[V], make: Callable[[], V]) -> None:
        try:
            thing = make()
        except BaseException as error:
            with self._lock:
                del self._shared[key]
            shared.thing.set_exception(error)
            return
        self.made += 1
        shared.thing.set_result(thing)

    def _give_back(self, key: Hashable, shared: _Shared[V]) -> bool:
        with self._lock:
            shared.users -= 1
            if shared.users == 0:
                del self._shared[key]
            return shared.users == 0


class Lease(Generic[V]):
    """One user's lease of ``value``."""

    def __init__(self, value: V, give_back: Callable[[], bool]) -> None:
        self.value = value
        self._give_back: Callable[[], bool] | None = give_back

    def end(self) -> bool:
        """Ends the lease. Returns True only to the last user; the pool has then forgotten the object.

        Ending twice is harmless.
        """
        give_back, self._give_back = self._give_back, None
        return give_back is not None and give_back()


class _Shared(Generic[V]):
    def __init__(self) -> None:
        self.users = 0
        self.thing: Future[V] = Future()


class ProcessResources:
    """The resources that all engines of a process share: reserved host memory, locks, pools and template processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[object, int] = {}
        self.cpu_lock = FairLock()
        self.weights: SharedPool[Any] = SharedPool()
        self.engines: SharedPool[Any] = SharedPool()
        self.checks: Counter[str] = Counter()  # loads whose checks can be recorded, by the reason why the checks ran
        self.templates = TextProcesses()  # render the chat templates of all models
        self._loading = threading.Lock()

    @contextlib.contextmanager
    def loading_alone(self) -> Iterator[None]:
        """Admits one thread at a time. Raises WorkCancelled if the work of the waiting thread is cancelled.

        While transformers builds a model, it changes torch's default dtype and its own functions for all threads.
        """
        while not self._loading.acquire(timeout=_LOOK_S):
            raise_if_cancelled()
        try:
            yield
        finally:
            self._loading.release()

    def promise(self, owner: object, setting: int | None, available: int, engines: int = 1) -> int:
        """Reserves host memory for ``owner``'s KV cache.

        Returns its size in bytes: ``setting`` if given, otherwise a default. The default is half of the memory that is
        not reserved yet, divided by the number of ``engines`` of the same kind.
        """
        with self._lock:
            free = max(0, available - sum(self._promised.values()))
            self._promised[owner] = default_kv_budget(free, engines) if setting is None else setting
            return self._promised[owner]

    def release(self, owner: object) -> None:
        with self._lock:
            self._promised.pop(owner, None)


PROCESS = ProcessResources()
