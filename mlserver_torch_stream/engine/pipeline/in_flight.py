"""Runs forwards of several batches at the same time, each in its own thread.

Each forward has a key and a batch. If the batch reads pages that other forwards write, the forward waits until these
have completed.

Batches in flight have no sequence in common. So the only pages that they share are pages that the scheduler lets
several sequences read: the pages of a common prefix, and the sources and targets of copies. No two batches write the
same page, because a page that several sequences hold is copied before it is written. While a sequence in flight reads a
page, no other sequence writes it. The only exception is the source page of a copy. It can be written after the sequence
that held it has returned it to the pool.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from mlserver_torch_stream.engine.cache.pages import Batch

K = TypeVar("K", bound=Hashable)
Pages = Mapping[int, set[int]]  # the pages of each group

_STATES = -1  # states count as another group, whose pages are the slots
_NONE: set[int] = set()


@dataclass(frozen=True, slots=True)
class _Use:
    """The pages that a batch uses.

    ``written`` are the pages of new tokens and the targets of copies; ``copied`` are the sources of copies.
    """

    written: Pages
    copied: Pages


class BatchesAhead(Generic[K]):
    """Records the pages that each batch in flight writes and copies, by the batch's key."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._uses: dict[K, _Use] = {}

    def add(self, key: K, batch: Batch) -> list[K]:
        """Adds a batch and returns the batches that it has to wait for."""
        use = _Use(self._written(batch), _copied(batch))
        waits_for = [
            other
            for other, ahead in self._uses.items()
            if _reads(batch, ahead.written) or _meet(use.copied, ahead.written) or _meet(use.written, ahead.copied)
        ]
        self._uses[key] = use
        return waits_for

    def remove(self, key: K) -> None:
        del self._uses[key]

    def _written(self, batch: Batch) -> Pages:
        written: dict[int, set[int]] = {}
        for each in batch.sequences:
            for group, table in enumerate(each.tables):
                written.setdefault(group, set()).update(table[each.start // self._page_size :])
            written.setdefault(_STATES, set()).add(each.state_slot)
        for group, _, target in batch.copies:
            written.setdefault(group, set()).add(target)
        for _, target in batch.state_copies:
            written.setdefault(_STATES, set()).add(target)
        for numbers in written.values():
            numbers.discard(-1)
        return written


def _copied(batch: Batch) -> Pages:
    copied: dict[int, set[int]] = {}
    for group, source, _ in (*batch.copies, *((_STATES, *copy) for copy in batch.state_copies)):
        copied.setdefault(group, set()).add(source)
    return copied


def _meet(one: Pages, other: Pages) -> bool:
    return any(not pages.isdisjoint(other.get(group, _NONE)) for group, pages in one.items())


def _reads(batch: Batch, written: Pages) -> bool:
    states = written.get(_STATES, _NONE)
    return any(
        each.state_slot in states
        or any(not written.get(group, _NONE).isdisjoint(table) for group, table in enumerate(each.tables))
        for each in batch.sequences
    )


T = TypeVar("T")


class BatchAheadFailed(Exception):
    """Raised if a forward did not run, because another forward failed to write pages that its batch reads."""


class InFlightForwards(Generic[K, T]):
    """Runs up to ``most`` forwards at once; the caller must not launch more. One thread calls all methods.

    The forwards run while the calling thread continues (``overlap``). Forwards run in daemon threads, because a forward
    may hang; Python would wait at exit for the threads of an executor.
    """

    overlap = True
    called_at_launch = False  # a thread calls the forward after ``launch`` has returned

    def __init__(self, most: int, threads: int, page_size: int) -> None:
        """``threads`` is the number of torch's threads for each forward; by default, torch would use all cores."""
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

        Forwards start in the order of their launches, so no forward waits for one that has no thread yet.
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
        """Waits until a forward has completed, and returns all completed forwards."""
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
