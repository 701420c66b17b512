"""Runs one forward at a time on the engine's own thread, where a pipeline runs several in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from mlserver_torch_stream.engine.batch import Batch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InlineForwards(Generic[K, T]):
    """``overlap``: a forward returns before its device is done, as on a GPU, so each is called when it is launched.

    Others take the engine's thread until they are done: each is called when it is asked for its result.
    """

    most = 1

    def __init__(self, *, overlap: bool = False) -> None:
        self.overlap = overlap
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
        """Nothing runs any more."""


def _done(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done
