"""Forwards under way in threads of their own, and those that have come back.

Knows nothing of rows; a flight is told apart by what it is for.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Flights(Generic[K, T]):
    """At most ``most`` at once, which the caller sees to. All methods are called by the thread that owns this."""

    def __init__(self, most: int, threads: int) -> None:
        """``threads``: of torch's, in each of ours; a new thread would take all of the host's cores."""
        self._pool = ThreadPoolExecutor(most, "stage", partial(torch.set_num_threads, threads))
        self._landed: queue.SimpleQueue[tuple[K, Future[T]]] = queue.SimpleQueue()
        self._away: set[K] = set()

    def __len__(self) -> int:
        return len(self._away)

    def __contains__(self, key: object) -> bool:
        return key in self._away

    def launch(self, key: K, work: Callable[[], T]) -> None:
        self._away.add(key)
        self._pool.submit(_inferring, work).add_done_callback(lambda done: self._landed.put((key, done)))

    def landed(self) -> list[tuple[K, Future[T]]]:
        """Waits for one, and takes all that are there."""
        back = [self._landed.get()]
        while not self._landed.empty():
            back.append(self._landed.get())
        self._away -= {key for key, _ in back}
        return back

    def close(self) -> None:
        """Waits for those that are under way."""
        self._pool.shutdown()


def _inferring(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()
