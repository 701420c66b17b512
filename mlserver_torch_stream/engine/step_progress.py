"""Records the work that an engine does and when it began. The engine's threads write it, any thread reads it.

Knows nothing of the kinds of work, nor of how long they may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
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
