"""One call of ``predict_stream`` of either runtime: its messages in, the responses to all of them out.

Knows MLServer's messages; nothing of how a reply to one is made, which an opener does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol
from uuid import uuid4

from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.v2_outputs import as_response
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests, until
from mlserver_torch_stream.server.streams.concurrent_replies import ConcurrentReplies, MessageReply
from mlserver_torch_stream.server.streams.read_timeout import ReadTimeout

BodyReply = MessageReply[JsonObject]


class ReplyOpener(Protocol):
    """Opens the replies to the messages of one stream; at most ``most_open`` are open at once."""

    most_open: int

    def first(
        self, payload: InferenceRequest, request_id: str, following: AsyncIterator[InferenceRequest]
    ) -> tuple[BodyReply, bool]:
        """The reply to the first message. True: it reads ``following``, all further messages, itself. Raises
        RequestError."""

    def further(self, payload: InferenceRequest, request_id: str, index: int) -> BodyReply:
        """The reply to a later message. Raises RequestError."""

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        """Writes the responses to a message that could not be read."""


class StreamSession:
    """Further messages are requests of their own, or belong to the first, as its reply says.

    MLServer gives all messages of a stream the first one's id, so each further request gets one of its own here. The
    next message is read when fewer than ``most_open`` requests run. The stream of a reader that takes no response for
    ``stalled_after`` seconds (0: no bound) is cut.
    """

    def __init__(
        self,
        name: str,
        opener: ReplyOpener,
        payloads: AsyncIterator[InferenceRequest],
        visits: InflightRequests,
        stalled_after: float = 0.0,
    ) -> None:
        self._name = name
        self._opener = opener
        self._payloads = payloads
        self._visits = visits
        self._stalled_after = stalled_after
        self._request_id = ""
        self._replies: ConcurrentReplies[InferenceRequest | None, JsonObject, InferenceResponse] | None = None
        self._unread: ReadTimeout[InferenceResponse] | None = None

    async def open(self) -> AsyncIterator[InferenceResponse]:
        """The responses. Raises RequestError if the first message is wrong."""
        first = await anext(self._payloads, None)
        if first is None:
            raise InvalidInput("inputs", "the stream ended before its first message")
        self._request_id = first.id or str(uuid4())
        following = until(self._visits.aborting, self._payloads)
        reply, reads_all = self._opener.first(first, self._request_id, following)

        def answer(message: InferenceRequest | None, index: int) -> BodyReply:
            return reply if message is None else self._further(message, index)

        messages = self._messages(only_first=reads_all)
        self._replies = ConcurrentReplies(messages, answer, as_response, self._opener.most_open)
        self._unread = ReadTimeout(self._replies, self._stalled_after, self._stalled)
        return self._unread

    def close(self) -> None:
        """Cancels the replies that still run. Synchronous and idempotent."""
        if self._unread is not None:
            self._unread.close()
        if self._replies is not None:
            self._replies.close()

    async def _messages(self, *, only_first: bool) -> AsyncIterator[InferenceRequest | None]:
        """None stands for the first message, which has been read."""
        yield None
        if not only_first:
            async for payload in until(self._visits.refusing, self._payloads):
                yield payload

    def _further(self, payload: InferenceRequest, index: int) -> BodyReply:
        request_id = f"{self._request_id}-{index}"
        try:
            return self._opener.further(payload, request_id, index)
        except InvalidInput as error:
            return _RefusedReply(error, self._opener.refused(request_id, index))

    def _stalled(self) -> None:
        seconds = self._stalled_after
        logger.warning(f"A client of model '{self._name}' has read nothing for {seconds:g} s: its stream is cut")
        self.close()


class _RefusedReply:
    """The reply to a message that could not be read."""

    def __init__(self, error: InvalidInput, failure: Callable[[Exception], Sequence[JsonObject]]) -> None:
        self._error = error
        self.failure = failure

    async def bodies(self) -> AsyncIterator[JsonObject]:
        for body in self.failure(self._error):
            yield body

    def close(self) -> None: ...
