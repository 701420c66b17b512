"""Runs forwards on the engine's thread, one at a time; ``InFlightForwards`` runs them in other threads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from mlserver_torch_stream.engine.batch import Batch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InlineForwards(Generic[K, T]):
    """``overlap``: a call of the forward returns before its device is done, as on a GPU. Then ``launch`` calls it.

    Otherwise the call lasts until the logits are there, so it is made in ``completed``. In both cases the engine's
    thread calls the forward; ``called_at_launch`` says whether it has returned before ``completed``.
    """

    most = 1

    def __init__(self, *, overlap: bool = False) -> None:
        self.overlap = self.called_at_launch = overlap
        self._launched: list[tuple[K, Callable[[], Future[T]]]] = []

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, key: K, work: Callable[[], T], batch: Batch) -> None:
        done = _done(work) if self.overlap else None
        self._launched.append((key, lambda: done or _done(work)))

    def completed(self) -> list[tuple[K, Future[T]]]:
        launched, self._launched = self._launched, []
        return [(key, result()) for key, result in launched]

    def close(self) -> None:
        """Does nothing: no forward runs between the calls."""


def _done(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done
