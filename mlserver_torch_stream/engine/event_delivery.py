"""Delivers events from an engine's threads to the event loops of the readers, with one wake-up for each loop.

Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.types import FinishReason

logger = logging.getLogger(__name__)

_Action = Callable[[], None]


def post_events(sequences: Sequence[SequenceState]) -> None:
    """Posts the new events of the sequences. On the engine's thread, which owns them."""
    _run_on_loops(
        (mailbox.loop, partial(mailbox.deliver, event))
        for sequence in sequences
        for event in sequence.take_events()
        if (mailbox := sequence.request.mailbox).closed_at is None
    )


def end_for_readers(requests: Sequence[RequestState], reason: FinishReason, error: Exception) -> None:
    """Gives readers their last events, as the engine's thread does not. Sequences that have ended stay as they are."""
    _run_on_loops((request.mailbox.loop, partial(request.end_for_reader, reason, error)) for request in requests)


def _run_on_loops(actions: Iterable[tuple[asyncio.AbstractEventLoop, _Action]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Action]] = {}
    for loop, action in actions:
        by_loop.setdefault(loop, []).append(action)
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_run_all, of_loop)
        except RuntimeError:  # the loop is closed: there is no reader left
            logger.debug("an event loop went away")


def _run_all(actions: Sequence[_Action]) -> None:
    for action in actions:
        action()
