"""Counts the requests of clients: sequences in flight by model, and prompts that have no token yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

_QUIET_S = 10.0


class ClientLoad:
    """``waiting_prompts``: complete prompts of all models that wait or are prefilled. ``active``: a request is in
    flight, or the last one ended less than ``quiet_s`` seconds ago, so that the next one is likely to come soon."""

    def __init__(self, quiet_s: float = _QUIET_S) -> None:
        self.waiting_prompts = 0
        self.active = False
        self._quiet_s = quiet_s
        self._timer: asyncio.TimerHandle | None = None
        self._sequences: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []

    def sequences(self, model: str) -> int:
        return self._sequences[model]

    def listen(self, listener: Callable[[], None]) -> None:
        """``listener`` is called whenever there is less load than before."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    def prompted(self, model: str, sequences: int) -> None:
        """A request is submitted."""
        self.waiting_prompts += 1
        self._sequences[model] += sequences
        self.active = True
        if self._timer is not None:
            self._timer.cancel()

    def first_token(self) -> None:
        self.waiting_prompts -= 1
        self._tell()

    def ended(self, model: str, sequences: int, *, answered: bool) -> None:
        """A request has ended. ``answered``: it had got its first token."""
        self.waiting_prompts -= not answered
        self._sequences[model] -= sequences
        if not any(self._sequences.values()):
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._quiet)
        self._tell()

    def _quiet(self) -> None:
        self.active = False
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()
