"""Runs each forward in a separate thread, and returns the forwards that are complete.

Knows nothing of stages. Each forward has a key and a batch; it waits for the forwards whose pages its batch reads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.pipeline.batches_ahead import BatchesAhead

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class BatchAheadFailed(Exception):
    """A forward did not run, as another one failed to write pages that its batch reads."""


class InFlightForwards(Generic[K, T]):
    """Runs at most ``most`` forwards at once, which the caller ensures. One thread calls all its methods.

    The forwards run while that thread goes on (``overlap``). Their threads are daemons: at its end Python waits for
    the threads of an executor, and one can hang.
    """

    overlap = True
    called_at_launch = False  # a thread calls the forward after ``launch`` has returned

    def __init__(self, most: int, threads: int, page_size: int) -> None:
        """``threads``: the number of torch's threads in each forward's thread; without it, each would use all cores."""
        self.most = most
        self._torch_threads = threads
        self._threads: list[threading.Thread] = []
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._completed: queue.SimpleQueue[tuple[K, Future[T]]] = queue.SimpleQueue()
        self._away: dict[K, Future[T]] = {}
        self._ahead: BatchesAhead[K] = BatchesAhead(page_size)

    def __len__(self) -> int:
        return len(self._away)

    def launch(self, key: K, work: Callable[[], T], batch: Batch) -> None:
        """Runs ``work``, the forward of ``batch``.

        Threads take forwards in the order of their launch, so that one never waits for another that waits for a thread.
        """
        ahead = [self._away[other] for other in self._ahead.add(key, batch)]
        done: Future[T] = Future()
        self._away[key] = done
        if len(self._threads) < min(len(self._away), self.most):
            self._threads.append(
                threading.Thread(target=self._run_forwards, name=f"stage_{len(self._threads)}", daemon=True)
            )
            self._threads[-1].start()

        def run() -> None:
            _complete(done, work, ahead)
            self._completed.put((key, done))

        self._waiting.put(run)

    def completed(self) -> list[tuple[K, Future[T]]]:
        """Waits for a forward to complete, and returns all that have completed."""
        back = [self._completed.get()]
        while not self._completed.empty():
            back.append(self._completed.get())
        for key, _ in back:
            del self._away[key]
            self._ahead.remove(key)
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
            del work  # it holds the requests of its step


def _complete(done: Future[T], work: Callable[[], T], ahead: Sequence[Future[T]]) -> None:
    try:
        for other in ahead:
            if (failure := other.exception()) is not None:
                raise BatchAheadFailed(f"a batch ahead failed: {failure}")
        with torch.inference_mode():
            done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
