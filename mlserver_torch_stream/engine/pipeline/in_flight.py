"""Forwards under way in threads of their own, and those that have come back.

Knows nothing of rows; a flight is told apart by what it is for.
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
    """At most ``most`` at once, which the caller sees to. All methods are called by the thread that owns this.

    Its threads are daemons: the interpreter would wait at its end for those of an executor, and one may hang.
    """

    def __init__(self, most: int, threads: int) -> None:
        """``threads``: of torch's, in each of ours; a new thread would take all of the host's cores."""
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
        """Waits for one, and takes all that are there."""
        back = [self._completed.get()]
        while not self._completed.empty():
            back.append(self._completed.get())
        self._away -= {key for key, _ in back}
        return back

    def close(self) -> None:
        """Waits for those that are under way."""
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
