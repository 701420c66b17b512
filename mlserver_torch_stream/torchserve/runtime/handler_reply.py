"""Replies to one request for a handler: reads its job and writes the pieces as V2 responses.

Knows nothing of other requests on the same stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.v2_binary import BinaryOutputs, attach_binary
from mlserver_torch_stream.torchserve.handler_request import HandlerFailed, HandlerJob, HandlerRequest, ResponsePiece
from mlserver_torch_stream.torchserve.runtime.handler_observer import HandlerRequestObserver
from mlserver_torch_stream.torchserve.v2_output import Reply, as_rest

# Of a response that holds all pieces: a handler that never ends must not fill the memory.
MOST_WHOLE_BYTES, MOST_WHOLE_PIECES = 1 << 30, 1 << 18

Submit = Callable[[HandlerRequest], HandlerJob]


class HandlerReply:
    """Reads the job that ``submit`` opens, once: as a stream of responses, or whole, of at most ``most_pieces`` pieces.

    ``binary``: the outputs that a REST client wants as raw bytes; None stands for gRPC, where all BYTES are raw.
    """

    comments = True

    def __init__(
        self,
        request: HandlerRequest,
        reply: Reply,
        submit: Submit,
        observer: HandlerRequestObserver,
        binary: BinaryOutputs | None = None,
        most_pieces: int = MOST_WHOLE_PIECES,
    ) -> None:
        self.error: Exception | None = None  # of a stream that failed after its first response
        self._binary = binary
        self._request = request
        self._reply = reply
        self._submit = submit
        self._observer = observer
        self._most_pieces = most_pieces
        self._job: HandlerJob | None = None
        self._closed = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def close(self) -> None:
        self._closed = True
        if self._job is not None:
            self._job.close()
        self._observer.closed()

    async def bodies(self) -> AsyncIterator[JsonObject]:
        async for piece in self.pieces():
            yield self._spelled(self._reply.piece(piece))

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """The whole response over REST, and the raw bytes that follow its JSON. Raises RequestError."""
        binary = self._binary or BinaryOutputs()
        return attach_binary(as_rest(await self.whole(), binary), binary)

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        """The final response of a stream that has begun; none if it was sent already."""
        return [] if self._reply.final_sent else [self._spelled(self._reply.failure(error))]

    def end(self) -> None:
        """None: the last response is the end of the stream."""

    def _spelled(self, body: JsonObject) -> JsonObject:
        return body if self._binary is None else as_rest(body)

    async def whole(self) -> JsonObject:
        """All pieces as one response. Raises RequestError."""
        return self._reply.whole([piece async for piece in self.pieces(whole=True)])

    async def pieces(self, *, whole: bool = False) -> AsyncGenerator[ResponsePiece, None]:
        """The pieces as the handler sent them; ``whole``: they are bounded. Raises RequestError."""
        last, count, size = False, 0, 0
        try:
            self._job = self._submit(self._request)
            if self._closed:
                self._job.close()
            async for piece in self._job:
                self._observer.piece(self._job.queued_s)
                last, count, size = piece.last, count + 1, size + len(piece.value)
                if whole and (size > MOST_WHOLE_BYTES or count > self._most_pieces):
                    message = f"{count} pieces, {size} bytes are too much for one response: stream it"
                    raise HandlerFailed(message, 507)
                yield piece
            if not last and self._closed:
                raise asyncio.CancelledError("the reply was closed before its end")
            if not last:
                raise GenerationFailed("the handler's stream ended early")
        except Exception as error:
            self._observer.failed(error)
            raise
        self._observer.end()
