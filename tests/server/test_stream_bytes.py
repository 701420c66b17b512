"""Over every API, a stream of events has exactly the bytes of ``stream_bytes.txt``.

``WRITE_STREAM_BYTES=1`` writes that file again after an intended change of the protocol.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mlserver_torch_stream.engine.api import Mailbox
from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.generation import Opened
from mlserver_torch_stream.protocol.spelling import ReplyContext, Spelling
from mlserver_torch_stream.protocol.spellings import REST_ROUTES, RestRoute
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.endpoints import Endpoint, EndpointRequest
from mlserver_torch_stream.server.rest.sse import EventStream
from mlserver_torch_stream.server.token_model import TokenReply
from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import (
    FinishReason,
    GenerationRequest,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from tests.protocol.asked import asked

_BYTES = Path(__file__).with_name("stream_bytes.txt")
_WRITES = "WRITE_STREAM_BYTES" in os.environ
_SPELLINGS = {type(each).__name__: each for row in REST_ROUTES if row.streaming is not False for each in row.spellings}
_STEPS_OF_THE_LOOP = 20  # more than a reader takes for one event

Events = Sequence[Sequence[TokenEvent]]
"""The events that are delivered at the same time, one after another."""


def _logprob(token_id: int, token: bytes) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, ((token_id, -0.5), (9, float("-inf"))), token, (token, b"\xe2"))


_PLAIN: Events = (
    (TokenEvent(0, "Grüße,", (1, 2), (), -1.25),),
    (TokenEvent(0, "", (3,), (), -1.5),),
    (TokenEvent(0, ' "new"\n', (4,)), TokenEvent(0, "line\x01", (5,))),
    (TokenEvent(0, " end", (6,), finish_reason=FinishReason.LENGTH, usage=Usage(4, 6, 0.25, 0.5, 3)),),
)
_RICH: Events = (
    (TokenEvent(0, reasoning="Let me", token_ids=(1,), logprobs=(_logprob(1, b"Let me"),), cumulative_logprob=-0.5),),
    (
        TokenEvent(1, "Two", (7,), (_logprob(7, b"Two"),), -0.5),
        TokenEvent(0, "One", (2,), (_logprob(2, b"One"),), -1.0),
    ),
    (
        TokenEvent(0, " a", (3,), (_logprob(3, b" a"),), -1.5),
        TokenEvent(0, tool_calls=(ToolCallDelta(0, "call_1", "look", '{"at":'),), token_ids=(4,)),
        TokenEvent(0, " b", (8,), (_logprob(8, b" b"),), -2.0),
    ),
    (TokenEvent(0, tool_calls=(ToolCallDelta(1, "call_2", "go"),), token_ids=(5,), cumulative_logprob=-2.5),),
    (TokenEvent(0, "", finish_reason=FinishReason.TOOL_CALLS, usage=Usage(4, 6, 0.1, 0.2, 0, 2)),),
    (TokenEvent(1, "!", (9,), (_logprob(9, b"!"),), -1.0, FinishReason.STOP, Usage(4, 2), stop_reason="."),),
)
_FAILED: Events = (
    (TokenEvent(0, "so far", (1,)),),
    (
        TokenEvent(0, " so good", (2,)),
        TokenEvent(0, finish_reason=FinishReason.ERROR, usage=Usage(4, 2), error=GenerationFailed("it broke")),
    ),
)
_SAMPLED = {"n": 2, "logprobs": True, "top_logprobs": 2}
_SHOWN = dict.fromkeys(("cumulative_logprob", "logprobs", "token_ids", "details", "usage_message"), True)
_CASES: Mapping[str, tuple[Events, GenerationRequest]] = {
    "plain": (_PLAIN, asked()),
    "rich": (_RICH, asked(sampling=_SAMPLED, **_SHOWN)),
    "named": (_PLAIN, asked(outputs=frozenset({"token_ids"}), token_ids=True)),
    "failed": (_FAILED, asked()),
}


async def _sent(spelling: Spelling, case: str) -> bytes:
    """Returns the bodies of all messages that the ASGI server gets for one stream."""
    events, request = _CASES[case]
    sent: list[dict[str, Any]] = []
    delivering: list[asyncio.Task[None]] = []

    async def deliver(mailbox: Mailbox) -> None:
        for at_once in events:
            for event in at_once:
                mailbox.deliver(event)
            for _ in range(_STEPS_OF_THE_LOOP):
                await asyncio.sleep(0)

    async def start(opened: Opened) -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), request.sampling.n, lambda *_: None)
        opened(mailbox)
        delivering.append(asyncio.create_task(deliver(mailbox)))

    async def send(message: Any) -> None:
        sent.append(message)

    context = ReplyContext("m", "v1", 17, headers={"Ce-Id": "r"})
    reply = TokenReply(request, spelling, context, start)
    endpoint = Endpoint(cast(Any, None), Lifecycle(), ServerOptions(), RestRoute("/", True, (spelling,)))
    posted = EndpointRequest(endpoint, {"type": "http", "path_params": {}, "headers": []}, cast(Any, None), send)
    async with EventStream(send, keep_alive=0, stalled_after=0, stalled=lambda: None, headers=[]) as stream:
        await posted._send_all(reply, stream)
    await asyncio.gather(*delivering)
    assert [each["type"] for each in sent] == ["http.response.start", *["http.response.body"] * (len(sent) - 1)]
    assert [each["more_body"] for each in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return b"".join(each["body"] for each in sent[1:])


def _sections() -> dict[str, bytes]:
    named = (section.split(b"\n", 1) for section in _BYTES.read_bytes().split(b"=== ")[1:])
    return {name.decode(): said for name, said in named}


@pytest.fixture(scope="module", autouse=True)
def _emptied() -> None:
    if _WRITES:
        _BYTES.write_bytes(b"")


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_a_stream_has_the_recorded_bytes(spelling: str, case: str) -> None:
    sent = asyncio.run(asyncio.wait_for(_sent(_SPELLINGS[spelling], case), 60))
    if _WRITES:
        with _BYTES.open("ab") as file:
            file.write(b"=== %b\n%b" % (f"{spelling} {case}".encode(), sent))
    assert sent == _sections()[f"{spelling} {case}"]
