"""Shares objects that are costly to make: each is made once per key, and its users lease it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from mlserver_torch_stream.work_threads import WorkCancelled, raise_if_cancelled

V = TypeVar("V")


class SharedPool(Generic[V]):
    """Any thread may lease. A thread that asks for an object which another thread makes waits for it."""

    def __init__(self) -> None:
        self.made = 0  # ever, failures left out
        self._lock = threading.Lock()
        self._shared: dict[Hashable, _Shared[V]] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def lease(self, key: Hashable, make: Callable[[], V]) -> Lease[V]:
        """Leases the object of ``key``. All waiting threads get an error of ``make``; the next lease tries again.

        If the work of the thread that makes it is cancelled, one of the waiting threads makes it.
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
        """Returns True, once, to the last user: the pool has forgotten the object. Ending twice is harmless."""
        give_back, self._give_back = self._give_back, None
        return give_back is not None and give_back()


class _Shared(Generic[V]):
    def __init__(self) -> None:
        self.users = 0
        self.thing: Future[V] = Future()
