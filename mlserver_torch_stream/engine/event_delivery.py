"""Delivers events from an engine's threads to the event loops of the readers, with one wake-up for each loop.

Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.types import FinishReason, TokenEvent

logger = logging.getLogger(__name__)


def post_events(sequences: Sequence[SequenceState]) -> None:
    """Posts the new events of the sequences. On the engine's thread, which owns them."""
    posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, TokenEvent]]] = {}
    for sequence in sequences:
        events = sequence.take_events()
        mailbox = sequence.request.mailbox
        if events and mailbox.closed_at is None:
            posts.setdefault(mailbox.loop, []).extend((mailbox, event) for event in events)
    for loop, post in posts.items():
        _call(loop, _hand_out, post)


def end_for_readers(requests: Sequence[RequestState], reason: FinishReason, error: Exception) -> None:
    """Gives readers their last events in place of the engine's thread. Sequences that have ended stay as they are."""
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestState]] = {}
    for request in requests:
        by_loop.setdefault(request.mailbox.loop, []).append(request)
    for loop, theirs in by_loop.items():
        _call(loop, _end, theirs, reason, error)


def _call(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *arguments: object) -> None:
    try:
        loop.call_soon_threadsafe(what, *arguments)
    except RuntimeError:  # the loop is closed: there is no reader left
        logger.debug("an event loop went away")


def _hand_out(post: list[tuple[Mailbox, TokenEvent]]) -> None:
    for mailbox, event in post:
        mailbox.deliver(event)


def _end(requests: Sequence[RequestState], reason: FinishReason, error: Exception) -> None:
    for request in requests:
        request.end_for_reader(reason, error)
