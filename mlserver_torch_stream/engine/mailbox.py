"""Holds the events of one submit for their reader on the event loop, merged as far as ``MAX_PER_EVENT`` allows.

The engine never waits for a reader; the length of the sequences bounds what a mailbox holds for a slow one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.api import StreamObserver
from mlserver_torch_stream.types import TokenEvent, add_event


@dataclass(slots=True)
class Delivered:
    """Summarises the events that were delivered of one sequence."""

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
    """A ``TokenStream``. All of it runs on the loop's thread; the engine's thread reads ``closed_at``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sequences: int, on_close: Callable[[Mailbox], object]) -> None:
        """``on_close`` is called if the reader closes the mailbox before the end of all sequences."""
        self.loop = loop
        self.closed_at: float | None = None
        self._unfinished = sequences
        self._pending: defaultdict[int, deque[TokenEvent]] = defaultdict(deque)  # by sequence; none is empty
        self._delivered: defaultdict[int, Delivered] = defaultdict(Delivered)
        self._observer: StreamObserver | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._on_close = on_close
        self._on_extend: Callable[[Mailbox, Sequence[int], bool], None] | None = None

    def feed_prompt_to(self, extend: Callable[[Mailbox, Sequence[int], bool], None]) -> None:
        """Sets the callback that gets the ids of an open request: ``extend(mailbox, prompt_ids, whole)``."""
        self._on_extend = extend

    def observe(self, observer: StreamObserver) -> None:
        self._observer = observer

    def delivered(self, index: int) -> Delivered:
        return self._delivered[index]

    def deliver(self, event: TokenEvent) -> None:
        """Drops events after a sequence's last one: the watchdog may have ended it before the engine's thread does."""
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
            self._pending[event.index] = waiting  # now after the other sequences, so that all of them advance
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
