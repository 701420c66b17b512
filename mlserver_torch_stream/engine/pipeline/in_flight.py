"""Runs forwards in threads of their own and returns those that complete.

Knows nothing of batches; each forward has a key.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InFlightForwards(Generic[K, T]):
    """Runs at most ``most`` forwards at once, which the caller ensures. One thread calls all its methods.

    Its threads are daemons: at its end the interpreter waits for the threads of an executor, and one can hang.
    """

    def __init__(self, most: int, threads: int) -> None:
        """``threads`` is the number of torch's threads in each of ours; a new thread would use all cores."""
        self._most = most
        self._torch_threads = threads
        self._threads: list[threading.Thread] = []
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._completed: queue.SimpleQueue[tuple[K, Future[T]]] = queue.SimpleQueue()
        self._away: set[K] = set()

    def __len__(self) -> int:
        return len(self._away)

    def __contains__(self, key: object) -> bool:
        return key in self._away

    def launch(self, key: K, work: Callable[[], T]) -> None:
        self._away.add(key)
        if len(self._threads) < min(len(self._away), self._most):
            self._threads.append(
                threading.Thread(target=self._run_forwards, name=f"stage_{len(self._threads)}", daemon=True)
            )
            self._threads[-1].start()
        self._waiting.put(lambda: self._completed.put((key, _future(work))))

    def completed(self) -> list[tuple[K, Future[T]]]:
        """Waits for a forward to complete, and returns all that have completed."""
        back = [self._completed.get()]
        while not self._completed.empty():
            back.append(self._completed.get())
        self._away -= {key for key, _ in back}
        return back

    def close(self) -> None:
        """Waits for the forwards that still run."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run_forwards(self) -> None:
        torch.set_num_threads(self._torch_threads)
        while (work := self._waiting.get()) is not None:
            work()


def _future(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        with torch.inference_mode():
            done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done
