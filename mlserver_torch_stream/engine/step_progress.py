"""What an engine is at and since when: written by its own threads, read by any.

Knows nothing of what the work is, nor of how long it may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work, in words, with the tokens that go into its forward."""

    what: str
    tokens: int
    since: float


class StepProgress:
    """The engine's thread is at one piece of work, or at none; forwards in threads of their own are told by a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._here: Work | None = None
        self._away: dict[Hashable, Work] = {}

    def at(self, what: str, tokens: int = 1) -> None:
        """The engine's thread begins this; what it was at before has come to its end."""
        self._here = Work(what, tokens, self._clock())

    def rest(self) -> None:
        """The engine's thread is at nothing, or waits for what is told elsewhere."""
        self._here = None

    def launched(self, key: Hashable, what: str, tokens: int = 1) -> None:
        self._away[key] = Work(what, tokens, self._clock())

    def completed(self, key: Hashable) -> None:
        self._away.pop(key, None)

    def works(self) -> list[Work]:
        """All that is under way. From any thread."""
        here = self._here
        return [*list(self._away.values()), *([here] if here is not None else [])]
