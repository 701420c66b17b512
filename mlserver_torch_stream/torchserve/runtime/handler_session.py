"""One call of ``predict_stream``: each message is a request of its own, and all are answered at once.

Knows MLServer's messages; how each is answered is ``HandlerReply``'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from uuid import uuid4

from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests, until
from mlserver_torch_stream.server.streams.concurrent_replies import ConcurrentReplies
from mlserver_torch_stream.server.streams.read_timeout import ReadTimeout
from mlserver_torch_stream.torchserve.handler_request import HandlerRequest
from mlserver_torch_stream.torchserve.runtime.handler_reply import HandlerReply
from mlserver_torch_stream.torchserve.v2_output import Reply

_MOST_OPEN = 256  # requests of one stream that run at once; the next message is read when one has ended

Open = Callable[[InferenceRequest, str, int], HandlerReply]


class HandlerSession:
    """``open_answer`` makes an answer of a message, its id and its number; a reader that stalls is given up."""

    def __init__(
        self,
        name: str,
        open_answer: Open,
        payloads: AsyncIterator[InferenceRequest],
        visits: InflightRequests,
        stalled_after: float,
    ) -> None:
        self._name = name
        self._open_answer = open_answer
        self._payloads = payloads
        self._visits = visits
        self._stalled_after = stalled_after
        self._request_id = ""
        self._answers: ConcurrentReplies[InferenceRequest | HandlerReply, InferenceResponse] | None = None
        self._unread: ReadTimeout[InferenceResponse] | None = None

    async def open(self) -> AsyncIterator[InferenceResponse]:
        """The responses. Raises RequestError if the first message is wrong."""
        first = await anext(self._payloads, None)
        if first is None:
            raise InvalidInput("inputs", "the stream ended before its first message")
        self._request_id = first.id or str(uuid4())
        answer = self._open_answer(first, self._request_id, 0)
        self._answers = ConcurrentReplies(self._messages(answer), self._answer, _MOST_OPEN)
        self._unread = ReadTimeout(self._answers, self._stalled_after, self._stalled)
        return self._unread

    def close(self) -> None:
        """Cancels what still runs. Synchronous and idempotent."""
        if self._unread is not None:
            self._unread.close()
        if self._answers is not None:
            self._answers.close()

    async def _messages(self, first: HandlerReply) -> AsyncIterator[InferenceRequest | HandlerReply]:
        yield first
        async for payload in until(self._visits.refusing, self._payloads):
            yield payload

    def _answer(self, message: InferenceRequest | HandlerReply, index: int) -> HandlerReply | _Refused:
        if isinstance(message, HandlerReply):
            return message
        # MLServer gives all messages of a stream the first one's id.
        request_id = f"{self._request_id}-{index}"
        try:
            return self._open_answer(message, request_id, index)
        except InvalidInput as error:
            return _Refused(Reply(self._name, None, HandlerRequest(request_id, ()), False, index), error)

    def _stalled(self) -> None:
        logger.warning(
            f"A client of model '{self._name}' has read nothing for {self._stalled_after:g} s: its stream is cut"
        )
        self.close()


class _Refused:
    """The answer to a message that could not be read."""

    def __init__(self, reply: Reply, error: InvalidInput) -> None:
        self._reply = reply
        self._error = error

    async def replies(self) -> AsyncIterator[InferenceResponse]:
        for response in self.failure(self._error):
            yield response

    def failure(self, error: Exception) -> Sequence[InferenceResponse]:
        body = self._reply.failure(error)
        return [InferenceResponse.model_validate({key: value for key, value in body.items() if key != "error"})]

    def close(self) -> None: ...
