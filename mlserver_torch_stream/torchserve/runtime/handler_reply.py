"""One request to a handler being answered: its job, and the V2 responses made of its pieces.

``bodies`` and ``whole_body`` are responses as REST spells them, ``replies`` and ``whole`` are MLServer's model of them,
for gRPC. Knows nothing of other requests on the same stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from mlserver.types import InferenceResponse

from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.torchserve.handler_request import HandlerFailed, HandlerJob, HandlerRequest, ResponsePiece
from mlserver_torch_stream.torchserve.runtime.handler_observer import HandlerRequestObserver
from mlserver_torch_stream.torchserve.v2_output import Body, Reply, as_rest, no_output

# Of a response that holds all pieces: a handler that never ends is not to fill the memory.
MOST_WHOLE_BYTES, MOST_WHOLE_PIECES = 1 << 30, 1 << 18

Submit = Callable[[HandlerRequest], HandlerJob]


class HandlerReply:
    """Reads the job that ``submit`` opens, once: as a stream of responses or as a whole of ``most_pieces``."""

    chat_tensors = False

    def __init__(
        self,
        request: HandlerRequest,
        reply: Reply,
        submit: Submit,
        watch: HandlerRequestObserver,
        most_pieces: int = MOST_WHOLE_PIECES,
    ) -> None:
        self.error: Exception | None = None  # that the client has been told after the answer had begun
        self._request = request
        self._reply = reply
        self._submit = submit
        self._watch = watch
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
        self._watch.closed()

    async def bodies(self) -> AsyncIterator[Body]:
        async for body in self._bodies():
            yield as_rest(body)

    async def replies(self) -> AsyncIterator[InferenceResponse]:
        async for body in self._bodies():
            yield _as_response(body)

    async def whole_body(self, binary: Callable[[str], bool] = no_output) -> Body:
        return as_rest(await self._whole(), binary)

    async def whole(self) -> InferenceResponse:
        return _as_response(await self._whole())

    def failure_bodies(self, error: Exception) -> Sequence[Body]:
        """The final response of a stream that has begun; none if it has had that."""
        return [] if self._reply.final_sent else [as_rest(self._reply.failure(error))]

    def failure(self, error: Exception) -> Sequence[InferenceResponse]:
        return [] if self._reply.final_sent else [_as_response(self._reply.failure(error))]

    async def _whole(self) -> Body:
        """All pieces as one response. Raises RequestError."""
        pieces: list[ResponsePiece] = []
        size = 0
        async with aclosing(self._pieces()) as coming:
            async for piece in coming:
                pieces.append(piece)
                size += len(piece.value)
                if size > MOST_WHOLE_BYTES or len(pieces) > self._most_pieces:
                    raise self._too_much(f"{len(pieces)} pieces, {size} bytes are too much for one response: stream it")
        return self._reply.whole(pieces)

    def _too_much(self, message: str) -> HandlerFailed:
        """The handler is told by whoever closes this answer."""
        error = HandlerFailed(message, 507)
        self._watch.failed(error)
        return error

    async def _bodies(self) -> AsyncIterator[Body]:
        """Raises what goes wrong before the first response; later the last response says it."""
        begun = False
        try:
            async for piece in self._pieces():
                body = self._reply.piece(piece)
                begun = True
                yield body
        except Exception as error:
            if not begun:
                raise
            self.error = error
            yield self._reply.failure(error)

    async def _pieces(self) -> AsyncGenerator[ResponsePiece, None]:
        last = False
        try:
            self._job = self._submit(self._request)
            if self._closed:
                self._job.close()
            async for piece in self._job:
                self._watch.piece()
                last = piece.last
                yield piece
            if not last and self._closed:
                raise asyncio.CancelledError("the answer was closed before its end")
            if not last:
                raise GenerationFailed("the handler's stream ended early")
        except Exception as error:
            self._watch.failed(error)
            raise
        self._watch.done()


def _as_response(body: Body) -> InferenceResponse:
    """gRPC carries no other parameters than strings, integers and booleans, and no error beside them."""
    return InferenceResponse.model_validate({key: value for key, value in body.items() if key != "error"})
