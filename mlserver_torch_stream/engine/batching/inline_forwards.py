"""Runs one forward at a time on the engine's own thread, where a pipeline runs several in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from mlserver_torch_stream.engine.batch import Batch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InlineForwards(Generic[K, T]):
    """Runs each launched forward when it is asked for its result."""

    def __init__(self) -> None:
        self._launched: list[tuple[K, Callable[[], T]]] = []

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, key: K, work: Callable[[], T], batch: Batch) -> None:
        self._launched.append((key, work))

    def completed(self) -> list[tuple[K, Future[T]]]:
        launched, self._launched = self._launched, []
        return [(key, _done(work)) for key, work in launched]

    def close(self) -> None:
        """Nothing runs any more."""


def _done(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done
