"""Carries events from an engine's thread to their readers on event loops, and actions to the engine's thread.

A mailbox holds the events of one submit, merged as far as ``MAX_PER_EVENT`` allows. The engine never waits for a
reader; a slow reader's mailbox cannot grow beyond the length of its sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.api import StreamObserver
from mlserver_torch_stream.types import TokenEvent, add_event

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Delivered:
    """Summarises the events of one sequence that were delivered."""

    tokens: int = 0
    first_at: float | None = None
    cumulative_logprob: float | None = None
    ended: bool = False

    def take(self, event: TokenEvent) -> None:
        if self.first_at is None:
            self.first_at = time.monotonic()
        self.tokens += len(event.token_ids)
        self.cumulative_logprob = event.cumulative_logprob
        self.ended = event.finish_reason is not None


class Mailbox:
    """A ``TokenStream``. All methods run on the loop's thread; the engine's thread only reads ``closed_at``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sequences: int, on_close: Callable[[Mailbox], object]) -> None:
        """``on_close`` is called if the reader closes the mailbox before the end of all sequences."""
        self.loop = loop
        self.closed_at: float | None = None
        self._unfinished = sequences
        self._pending: defaultdict[int, deque[TokenEvent]] = defaultdict(deque)  # by sequence; no queue in it is empty
        self._delivered: defaultdict[int, Delivered] = defaultdict(Delivered)
        self._observer: StreamObserver | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._on_close = on_close
        self._on_extend: Callable[[Mailbox, Sequence[int], bool], None] | None = None

    def feed_prompt_to(self, extend: Callable[[Mailbox, Sequence[int], bool], None]) -> None:
        """Sets the callback for the ids of an open request: ``extend(mailbox, prompt_ids, whole)``."""
        self._on_extend = extend

    def observe(self, observer: StreamObserver) -> None:
        self._observer = observer

    def delivered(self, index: int) -> Delivered:
        """Returns a summary of the sequence's events that the reader has received."""
        return self._delivered[index]

    def deliver(self, event: TokenEvent) -> None:
        """Adds an event.

        Events after a sequence's last event are dropped: the watchdog may have ended the sequence already.
        """
        delivered = self._delivered[event.index]
        if self.closed_at is not None or delivered.ended:
            return
        delivered.take(event)
        add_event(self._pending[event.index], event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._pending:
            # This suspends once per event: a generator that never waits starves the server and misses disconnects.
            await asyncio.sleep(0)
        while not self._pending:
            if self._unfinished == 0 or self.closed_at is not None:
                raise StopAsyncIteration
            self._arrival = self.loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        waiting = self._pending.pop(next(iter(self._pending)))
        event = waiting.popleft()
        if waiting:
            self._pending[event.index] = waiting  # behind the other sequences, so that all of them advance
        if event.finish_reason is not None:
            self._unfinished -= 1
        if self._observer is not None:
            self._observer.event(event)
        return event

    def extend(self, prompt_ids: Sequence[int]) -> None:
        self._feed(prompt_ids, whole=False)

    def seal(self, prompt_ids: Sequence[int]) -> None:
        self._feed(prompt_ids, whole=True)

    def _feed(self, prompt_ids: Sequence[int], whole: bool) -> None:
        if self._on_extend is None:
            raise ValueError("only a stream of one open request takes more of its prompt")
        self._on_extend(self, prompt_ids, whole)
        if whole:
            self._on_extend = None

    def close(self) -> None:
        if self.closed_at is not None:
            return
        self.closed_at = time.monotonic()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if self._unfinished > 0:
            self._on_close(self)
        if self._observer is not None:
            self._observer.closed()


def call_on(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Calls ``action`` on the loop's thread. Any thread may call this. Does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:  # there is no reader left
        logger.debug("an event loop was closed before its action ran")


class Inbox:
    """Holds actions for the engine's thread.

    Any thread may call ``post`` and ``close``; only the engine's thread may call the other methods.
    """

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._close_lock = threading.Lock()  # no action is posted between the last look and the end
        self._closed = False

    def post(self, action: Callable[[], None]) -> bool:
        """Queues an action. Returns False if the inbox is closed, so that the action will not run."""
        with self._close_lock:
            if self._closed:
                return False
            self._actions.put(action)
            return True

    def close(self) -> None:
        """Refuses all further actions. Wakes the engine's thread if it is waiting."""
        with self._close_lock:
            self._closed = True
            self._actions.put(lambda: None)

    def wait(self) -> None:
        """Sleeps until there is an action, and runs it."""
        self._actions.get()()

    def take_in(self, *, last: bool) -> None:
        """Runs all queued actions. With ``last`` the inbox is closed afterwards."""
        with self._close_lock if last else contextlib.nullcontext():
            self._closed = self._closed or last
            while not self._actions.empty():
                self._actions.get()()
