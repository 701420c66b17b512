"""Carries events from an engine's thread to event loops, and actions from any thread to the engine's.

``post`` says whether an action will run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.types import FinishReason, TokenEvent

logger = logging.getLogger(__name__)


def post_events(sequences: Sequence[SequenceState]) -> None:
    """Posts the new events of the sequences, on the engine's thread, which owns them. Each loop is woken up once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, TokenEvent]]] = {}
    for sequence in sequences:
        if events := sequence.take_events():
            mailbox = sequence.request.mailbox
            if mailbox.closed_at is None:
                by_loop.setdefault(mailbox.loop, []).extend([(mailbox, event) for event in events])
    for loop, of_loop in by_loop.items():
        _run_on(loop, partial(_deliver, of_loop))


def end_for_readers(requests: Sequence[RequestState], reason: FinishReason, error: Exception) -> None:
    """Sends readers their last events without the engine's thread, which hangs.

    A sequence that has ended already gets no further event.
    """
    for request in requests:
        _run_on(request.mailbox.loop, partial(request.end_for_reader, reason, error))


def _run_on(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:  # the loop is closed: there is no reader left
        logger.debug("an event loop went away")


def _deliver(events: Sequence[tuple[Mailbox, TokenEvent]]) -> None:
    for mailbox, event in events:
        mailbox.deliver(event)


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
