"""Serves one gRPC stream of either runtime: reads its messages and yields the responses to all of them.

Knows MLServer's messages. Knows nothing of how the reply to a message is made: an opener makes it.
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


class GrpcReply(MessageReply[JsonObject], Protocol):
    """The reply to one request over gRPC, which is read once: as a stream of bodies or as a whole."""

    async def whole(self) -> JsonObject:
        """Raises RequestError."""


class ReplyOpener(Protocol):
    """Opens the replies to gRPC messages; of those of one stream, at most ``most_open`` are open at once."""

    most_open: int

    def open(
        self,
        payload: InferenceRequest,
        request_id: str,
        index: int | None = None,
        following: AsyncIterator[InferenceRequest] | None = None,
    ) -> tuple[GrpcReply, bool]:
        """The reply to a message; True if it reads ``following``, all further messages of the stream, itself.

        ``index`` numbers the requests of a stream; None stands for a unary call. Raises RequestError.
        """

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        """Writes the responses to a message that could not be read."""


class StreamSession:
    """The opener decides whether further messages are requests of their own or belong to the first one.

    MLServer gives all messages of a stream the id of the first one, so each further request gets a new id here. The
    next message is read when fewer than ``most_open`` requests run. The stream of a reader that takes no response for
    ``stalled_after`` seconds (0: no limit) is cut.
    """

    def __init__(
        self,
        name: str,
        opener: ReplyOpener,
        payloads: AsyncIterator[InferenceRequest],
        inflight: InflightRequests,
        stalled_after: float,
    ) -> None:
        self._name = name
        self._opener = opener
        self._payloads = payloads
        self._inflight = inflight
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
        following = until(self._inflight.aborting, self._payloads)
        reply, reads_all = self._opener.open(first, self._request_id, 0, following)

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
        """None means the first message, which has been read already."""
        yield None
        if not only_first:
            async for payload in until(self._inflight.refusing, self._payloads):
                yield payload

    def _further(self, payload: InferenceRequest, index: int) -> BodyReply:
        request_id = f"{self._request_id}-{index}"
        try:
            reply, _ = self._opener.open(payload, request_id, index)
            return reply
        except InvalidInput as error:
            return _RefusedReply(error, self._opener.refused(request_id, index))

    def _stalled(self) -> None:
        seconds = self._stalled_after
        logger.warning(f"A client of model '{self._name}' has read nothing for {seconds:g} s: its stream is closed")
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
