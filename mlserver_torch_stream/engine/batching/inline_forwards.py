"""Runs forwards on the engine's thread, one at a time; ``InFlightForwards`` runs them in other threads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, cast

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
        self._launched: list[tuple[K, _Call[T]]] = []

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, key: K, work: Callable[[], T], batch: Batch) -> None:
        call = _Call(work)
        self._launched.append((key, call))
        if self.called_at_launch:
            call.run()

    def completed(self) -> list[tuple[K, _Call[T]]]:
        launched, self._launched = self._launched, []
        for _, call in launched if not self.called_at_launch else ():
            call.run()
        return launched

    def close(self) -> None:
        """Does nothing: no forward runs between the calls."""


class _Call(Generic[T]):
    """A call whose result is asked for later, as that of a ``Future``."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)
