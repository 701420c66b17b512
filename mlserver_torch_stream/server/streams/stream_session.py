"""One call of ``predict_stream``: its messages in, the responses to all of them out.

Knows MLServer's messages and what several of them on one stream mean; how each is answered is ``V2Answer``'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from uuid import uuid4

from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.generation import Generator, Opened
from mlserver_torch_stream.protocol.v2_pieces import decode_piece
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests, until
from mlserver_torch_stream.server.streams.concurrent_replies import ConcurrentReplies
from mlserver_torch_stream.server.streams.read_timeout import ReadTimeout
from mlserver_torch_stream.server.streams.token_reply import ModelName, V2Answer
from mlserver_torch_stream.types import GenerationRequest, Prompt, StreamMode, TextPrompt


class StreamSession:
    """The first message decides what the others are: requests of their own, or pieces of its prompt.

    MLServer gives all messages of a stream the first one's id, so each further request gets one of its own here. At
    most as many requests are open at once as a batch has rows; the next message is read when one of them has ended.
    A reader that takes no response for ``stalled_after`` seconds is given up, and a client that sends no further piece
    of its prompt for ``piece_timeout`` is told so (0: never).
    """

    def __init__(
        self,
        generator: Generator,
        model: ModelName,
        payloads: AsyncIterator[InferenceRequest],
        visits: InflightRequests,
        stalled_after: float = 0.0,
        piece_timeout: float = 0.0,
    ) -> None:
        self._generator = generator
        self._model = model
        self._payloads = payloads
        self._visits = visits
        self._request_id = ""
        self._running: ConcurrentReplies[InferenceRequest | GenerationRequest, InferenceResponse] | V2Answer | None = (
            None
        )
        self._stalled_after = stalled_after
        self._piece_timeout = piece_timeout
        self._unread: ReadTimeout[InferenceResponse] | None = None

    async def open(self) -> AsyncIterator[InferenceResponse]:
        """The responses. Raises RequestError if the first message is wrong."""
        first = await anext(self._payloads, None)
        if first is None:
            raise InvalidInput("inputs", "the stream ended before its first message")
        self._request_id = first.id or str(uuid4())
        request = self._decode(first, self._request_id)
        if request.stream_mode is StreamMode.PROMPT:
            self._running = V2Answer(request, self._model, partial(self._assemble, request))
            return self._watched(self._running.replies())
        self._running = ConcurrentReplies(self._messages(request), self._answer, self._generator.info.max_rows)
        return self._watched(self._running)

    def close(self) -> None:
        """Cancels what still runs. Synchronous and idempotent."""
        if self._unread is not None:
            self._unread.close()
        if self._running is not None:
            self._running.close()

    def _watched(self, replies: AsyncIterator[InferenceResponse]) -> AsyncIterator[InferenceResponse]:
        self._unread = ReadTimeout(replies, self._stalled_after, self._stalled)
        return self._unread

    def _stalled(self) -> None:
        seconds = self._stalled_after
        logger.warning(f"A client of model '{self._model.name}' has read nothing for {seconds:g} s: its stream is cut")
        self.close()

    def _decode(self, payload: InferenceRequest, request_id: str, mode: StreamMode | None = None) -> GenerationRequest:
        with self._generator.decoding(request_id):
            request = decode_request(payload, self._generator.info, streaming=True, request_id=request_id)
            if mode not in (None, request.stream_mode):
                raise InvalidInput("stream_mode", "differs from that of the stream's first message")
            return request

    async def _messages(self, first: GenerationRequest) -> AsyncIterator[InferenceRequest | GenerationRequest]:
        yield first
        async for payload in until(self._visits.refusing, self._payloads):
            yield payload

    def _answer(self, message: InferenceRequest | GenerationRequest, index: int) -> V2Answer:
        if isinstance(message, GenerationRequest):
            return V2Answer(message, self._model, partial(self._generator.start, message), index)
        request_id = f"{self._request_id}-{index}"
        try:
            request = self._decode(message, request_id, StreamMode.EACH)
        except InvalidInput as error:
            placeholder = GenerationRequest(request_id, (TextPrompt(""),))
            return V2Answer(placeholder, self._model, partial(_refuse, error), index)
        return V2Answer(request, self._model, partial(self._generator.start, request), index)

    async def _assemble(self, request: GenerationRequest, opened: Opened) -> None:
        await self._generator.assemble(request, self._pieces(request), opened, timeout=self._piece_timeout)

    async def _pieces(self, request: GenerationRequest) -> AsyncIterator[Prompt]:
        async for payload in until(self._visits.aborting, self._payloads):
            yield decode_piece(payload, request, self._generator.info)


async def _refuse(error: InvalidInput, opened: Opened) -> None:
    raise error
