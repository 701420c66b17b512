"""What an engine's thread is to do before its next step, as others ask it to.

Knows nothing of what that is. Whoever asks is told whether it will be done.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Inbox:
    """``post`` and ``close`` may be called from any thread, the rest is the engine's."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last_word = threading.Lock()  # between those who post and the last look
        self._closed = False

    def post(self, action: Callable[[], None]) -> bool:
        """False if nothing more will be done."""
        with self._last_word:
            if self._closed:
                return False
            self._actions.put(action)
            return True

    def close(self) -> None:
        """Nothing more is taken in. Wakes the engine's thread, should it wait."""
        with self._last_word:
            self._closed = True
            self._actions.put(lambda: None)

    def wait(self) -> None:
        """Sleeps until there is something, and does it."""
        self._actions.get()()

    def take_in(self, *, last: bool) -> None:
        """Does all that is there. ``last``: what is posted from then on is refused."""
        with self._last_word if last else contextlib.nullcontext():
            self._closed = self._closed or last
            while not self._actions.empty():
                self._actions.get()()
