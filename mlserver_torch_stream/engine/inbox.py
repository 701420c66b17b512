"""Queues actions that an engine's thread runs before its next step.

Knows nothing of the actions. ``post`` says whether an action will run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Inbox:
    """Any thread may call ``post`` and ``close``; the engine's thread alone calls the rest."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._close_lock = threading.Lock()  # no action is posted between the last look and the end
        self._closed = False

    def post(self, action: Callable[[], None]) -> bool:
        """Returns False if the inbox is closed: the action will not run."""
        with self._close_lock:
            if self._closed:
                return False
            self._actions.put(action)
            return True

    def close(self) -> None:
        """Refuses all later actions. Wakes the engine's thread if it waits."""
        with self._close_lock:
            self._closed = True
            self._actions.put(lambda: None)

    def wait(self) -> None:
        """Sleeps until there is an action, and runs it."""
        self._actions.get()()

    def take_in(self, *, last: bool) -> None:
        """Runs all actions that are queued. ``last`` closes the inbox."""
        with self._close_lock if last else contextlib.nullcontext():
            self._closed = self._closed or last
            while not self._actions.empty():
                self._actions.get()()
