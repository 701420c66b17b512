"""Rank 0's word to the others: what they are to do, that it still lives, and that they are lost or may go.

Knows nothing of models. Calls that talk are made one at a time, whichever thread makes them.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.rank_processes import OtherRanks

logger = logging.getLogger(__name__)

_BEAT = 5.0  # seconds between two signs of life; a quarter of the silence that means death
_FATE = 1.0  # seconds in which a process that has hung up is seen to end
_LEAVE = 5.0  # seconds for the others to end
PATIENCE = 5.0  # seconds for a step to notice that nobody answers it any more


OnLoss = Callable[[BaseException, float], None]
"""A method that is told why, and how many seconds' patience to have."""


class RanksLost(RuntimeError):
    """A rank is gone, or has done something else than the others: what they hold is worth nothing any more."""


class Leader:
    """Collects what the followers are to do and sends it with the next forward, or with the next sign of life."""

    def __init__(self, group: RankGroup, other_ranks: OtherRanks) -> None:
        self.size = group.size
        self.lost: str | None = None
        self._group = group
        self._other_ranks = other_ranks
        self._speaking_lock = threading.RLock()
        self._fate_lock = threading.Lock()
        self._notes: deque[list[Any]] = deque()
        self._names = count(1)
        self._over = threading.Event()
        self._left = False
        self._listeners: list[weakref.WeakMethod[OnLoss]] = []
        other_ranks.watch(self.lose)
        threading.Thread(target=self._live, name="ranks-pulse", daemon=True).start()
        atexit.register(self.stop)

    def name(self) -> int:
        """A new one, for something that exists on every rank."""
        return next(self._names)

    def note(self, *operation: Any) -> None:
        """Something that the others are to do before the next forward. From any thread."""
        if not self._over.is_set():
            self._notes.append(list(operation))

    @contextmanager
    def speaking(self, *operation: Any) -> Iterator[None]:
        """Has the others do what was noted and ``operation`` while the block does the same here.

        Whatever it raises has not happened on all ranks alike, so the group is lost.
        """
        with self._speaking_lock:
            self.check()
            if self._over.is_set():
                raise RanksLost("the ranks were let go")
            try:
                self.note(*operation)
                self._send()
                yield
            except BaseException as error:
                self.lose(f"{type(error).__name__}: {error}")
                raise

    @contextmanager
    def mirrored(self, *operation: Any) -> Iterator[None]:
        """Notes what the block does here. Raising in it loses the group."""
        self.note(*operation)
        try:
            yield
        except BaseException as error:
            self.lose(f"{type(error).__name__}: {error}")
            raise

    def check(self) -> None:
        """Raises RanksLost if they are."""
        if self.lost is not None:
            raise RanksLost(f"the ranks have lost each other: {self.lost}")

    def watch_loss(self, on_loss: OnLoss) -> None:
        """Calls ``on_loss`` once, on any thread, if its object still lives; at once if the ranks are lost already."""
        with self._fate_lock:
            self._listeners = [each for each in self._listeners if each() is not None]
            self._listeners.append(weakref.WeakMethod(on_loss))
            lost = self.lost
        if lost is not None:
            on_loss(RanksLost(lost), PATIENCE)

    def lose(self, why: str) -> None:
        """Gives the group up. The first reason counts, unless a process has ended: then that is the reason."""
        with self._fate_lock:
            if self._over.is_set():
                return
            self._over.set()
            self.lost = self._other_ranks.fate(_FATE) or why
            listeners = self._listeners
        logger.error("The ranks have lost each other: %s", self.lost)
        self._other_ranks.kill()
        for listener in listeners:
            if (on_loss := listener()) is not None:
                on_loss(RanksLost(self.lost), PATIENCE)

    def stop(self) -> None:
        """Lets the others go. Idempotent; blocks until they have ended."""
        with self._fate_lock:
            orderly = not self._over.is_set()
            self._over.set()
        atexit.unregister(self.stop)
        if orderly and self._speaking_lock.acquire(timeout=_LEAVE):
            try:
                self._notes.append(["stop"])
                self._send()
            except RuntimeError as error:
                logger.warning("the other ranks did not hear that they may go: %s", error)
            finally:
                self._speaking_lock.release()
        self._other_ranks.end(_LEAVE if orderly else 0)
        if not self._left:
            self._left = True
            self._group.leave()

    def _send(self) -> None:
        operations = []
        while self._notes:
            operations.append(self._notes.popleft())
        self._group.command(operations)

    def _live(self) -> None:
        while not self._over.wait(_BEAT):
            try:
                with self.speaking("pulse"):
                    self._group.pulse()
            except RuntimeError:
                return  # told by ``lose``
