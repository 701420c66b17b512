"""Lets the engines of one device step in turn, and records the work that each of them does.

The engine's threads write it, any thread reads it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Some work, with the number of tokens in its forward.

    ``str(what)`` describes the work; it is formatted only when somebody reports it.
    """

    what: object
    tokens: int
    since: float


class StepProgress:
    """Holds the work of the engine's thread, if any, and of forwards in other threads, each under a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: Work | None = None
        self._in_flight: dict[Hashable, Work] = {}

    def at(self, what: object, tokens: int = 1) -> None:
        """The engine's thread begins this work and has ended its previous work."""
        self._current = Work(what, tokens, self._clock())

    def rest(self) -> None:
        """The engine's thread is idle, or waits for forwards in other threads."""
        self._current = None

    def launched(self, key: Hashable, what: object, tokens: int = 1) -> None:
        self._in_flight[key] = Work(what, tokens, self._clock())

    def completed(self, key: Hashable) -> None:
        self._in_flight.pop(key, None)

    def works(self) -> list[Work]:
        """Returns all work that is not complete. From any thread."""
        current = self._current
        return [*list(self._in_flight.values()), *([current] if current is not None else [])]


class FairLock:
    """A lock that threads get in the order in which they ask, so that engines on the same cores step in turn.

    Two OpenMP pools that spin on the same cores slow each other tenfold (measured). With a plain lock a busy engine
    takes the lock again before a waiting engine wakes up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False
        self.progress: StepProgress | None = None  # of the engine that holds the lock

    @contextmanager
    def held_by(self, progress: StepProgress) -> Iterator[bool]:
        """Holds the lock, and yields whether another thread had it.

        In ``progress`` the engines that wait for the lock see how long the holder's step takes.
        """
        with self as waited:
            self.progress = progress
            try:
                yield waited
            finally:
                self.progress = None

    def __enter__(self) -> bool:
        """Returns whether another thread had the lock."""
        with self._lock:
            if not self._held:
                self._held = True
                return False
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()
        return True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def yield_turn(self) -> None:
        """Releases the lock, which the caller holds, and takes it again after all waiting threads."""
        progress, self.progress = self.progress, None
        self.__exit__()
        self.__enter__()
        self.progress = progress
