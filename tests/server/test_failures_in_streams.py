"""A sequence fails while its reader lags: text that the reader has not received yet comes before the error."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from mlserver_torch_stream.engine.api import Mailbox
from mlserver_torch_stream.errors import GenerationFailed, NotServing, TimedOut
from mlserver_torch_stream.generation import Opened
from mlserver_torch_stream.protocol.spelling import ReplyContext, Spelling
from mlserver_torch_stream.protocol.spellings import REST_ROUTES
from mlserver_torch_stream.server.request import as_refusal
from mlserver_torch_stream.server.token_model import TokenReply
from mlserver_torch_stream.types import FinishReason, TokenEvent
from tests.protocol.asked import asked

_SPELLINGS = {type(each).__name__: each for row in REST_ROUTES if row.streaming is not False for each in row.spellings}


def _streamed(spelling: Spelling, *events: TokenEvent) -> list[dict[str, Any]]:
    """Returns the messages of a stream whose events are all there before its reader begins."""

    async def start(opened: Opened) -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), 1, lambda mailbox: None)
        for event in events:
            mailbox.deliver(event)
        opened(mailbox)

    async def read() -> list[dict[str, Any]]:
        reply = TokenReply(asked(), spelling, ReplyContext("m"), start)
        bodies = []
        try:
            async for body in reply.bodies():
                bodies.append(body)
        except Exception as error:
            if not bodies:
                raise
            bodies += reply.failure(as_refusal(error))
        return bodies

    return asyncio.run(read())


@pytest.mark.parametrize("spelling", _SPELLINGS.values(), ids=list(_SPELLINGS))
@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.ERROR, GenerationFailed("it broke")),
        (FinishReason.TIMEOUT, TimedOut("it broke")),
        (FinishReason.ABORT, NotServing("it broke")),
    ],
)
def test_text_that_a_failure_was_merged_with_is_sent_before_it(
    spelling: Spelling, reason: FinishReason, error: Exception
) -> None:
    bodies = _streamed(
        spelling,
        TokenEvent(0, "so ", (7,)),
        TokenEvent(0, "far", (8,)),
        TokenEvent(0, finish_reason=reason, error=error),
    )
    messages = [orjson.dumps(body) for body in bodies]
    begin = next(place for place, each in enumerate(messages) if b"it broke" in each)
    said, failures = messages[:begin], messages[begin:]
    assert sum(b"so far" in each for each in said) == 1
    assert all(b"it broke" in each for each in failures) and b"so far" not in failures[-1]


@pytest.mark.parametrize("spelling", _SPELLINGS.values(), ids=list(_SPELLINGS))
def test_a_failure_without_text_is_raised_as_long_as_nothing_was_sent(spelling: Spelling) -> None:
    with pytest.raises(TimedOut, match="late"):
        _streamed(spelling, TokenEvent(0, finish_reason=FinishReason.TIMEOUT, error=TimedOut("late")))
