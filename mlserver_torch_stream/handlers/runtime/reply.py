"""Writes the replies to a handler's requests, and reports each request once, at its end.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, QueueFull, RequestError
from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetrics
from mlserver_torch_stream.handlers.pool.handler_request import (
    HandlerFailed,
    HandlerRequest,
    PieceStream,
    RequestPart,
    ResponsePiece,
)
from mlserver_torch_stream.handlers.runtime.v2_messages import PieceEncoder, as_rest
from mlserver_torch_stream.protocol.spelling import JsonObject, Spelling
from mlserver_torch_stream.protocol.v2_tensors import BinaryOutputs, attach_binary
from mlserver_torch_stream.server.observability.request_observer import (
    CANCELLED,
    REFUSED,
    RequestRecord,
    RequestReports,
    TimedRequest,
)
from mlserver_torch_stream.server.rest.connection import parse_json
from mlserver_torch_stream.types import FinishReason


class HandlerRequestObserver(TimedRequest):
    """Measures one request to a handler.

    The request's log line has no token counts, since a handler's pieces need not be tokens.
    """

    def __init__(self, record: RequestRecord, reports: RequestReports, handler_metrics: HandlerMetrics) -> None:
        super().__init__(record, reports)
        self._handler_metrics = handler_metrics

    def piece(self, queued_s: float | None) -> None:
        """Records that a piece was delivered, and how long the request was queued, in seconds."""
        if self.record.ttft_s is None:
            self.record.queue_s = queued_s
            self.first_event(time.monotonic())

    def count(self) -> None:
        """Counts the request in the metrics, by how it ended."""
        outcome, reason = self._outcome()
        self._handler_metrics.requests[outcome] += 1
        self.metrics.ended(reason, self.record.e2e_s, self.record.queue_s or 0.0)

    def _outcome(self) -> tuple[str, str]:
        """Returns how the request ended: the label of the handlers' metric, and the label of the metric of all
        requests.
        """
        record = self.record
        if record.client_disconnected:
            return "cancelled", CANCELLED
        if record.error is None:
            return "ok", FinishReason.STOP.value
        if isinstance(record.error, (QueueFull, NotServing)) and record.ttft_s is None:
            return "refused", REFUSED
        return "error", FinishReason.ERROR.value


# The bounds of a response that holds all pieces, so that a handler that never ends cannot fill the memory.
MAX_WHOLE_BYTES, MAX_WHOLE_PIECES = 1 << 30, 1 << 18

_STREAM_NEXT = "ts_stream_next"


class Submit(Protocol):
    """Queues a request for the workers, as ``WorkerPool.submit`` does. Raises RequestError."""

    def __call__(self, request: HandlerRequest, *, more: bool = False) -> PieceStream: ...


class PieceReader:
    """Submits a request and reads its pieces, once. A whole reply has at most ``most_pieces`` pieces."""

    def __init__(
        self,
        request: HandlerRequest,
        submit: Submit,
        observer: HandlerRequestObserver,
        most_pieces: int = MAX_WHOLE_PIECES,
    ) -> None:
        self._request = request
        self._submit = submit
        self._observer = observer
        self._most_pieces = most_pieces
        self._job: PieceStream | None = None
        self._refusal: RequestError | None = None
        self._closed = False

    @property
    def request_id(self) -> str:
        """The request's id, set by the client or made by the server."""
        return self._request.request_id

    def close(self) -> None:
        """Cancels the request unless it has ended. Idempotent."""
        self._closed = True
        if self._job is not None:
            self._job.close()
        self._observer.closed()

    def begin(self, more: bool = False) -> PieceStream:
        """Submits the request.

        With ``more``, the next request of the same batch follows at once. Raises RequestError, and the same one if it
        is called again.
        """
        if self._refusal is not None:
            raise self._refusal
        try:
            self._job = self._submit(self._request, more=more)
        except RequestError as error:
            self._refusal = error
            self._observer.failed(error)
            raise
        if self._closed:
            self._job.close()
        return self._job

    async def pieces(self, *, whole: bool = False) -> AsyncGenerator[ResponsePiece, None]:
        """Yields the pieces as the handler sent them; with ``whole``, enforces the limits of a whole reply.

        Raises RequestError.
        """
        last, count, size = False, 0, 0
        answer: ResponsePiece | None = None
        job = self._job or self.begin()
        try:
            async for piece in job:
                self._observer.piece(job.queued_s)
                last, count, size = piece.last, count + 1, size + len(piece.value)
                if whole and (size > MAX_WHOLE_BYTES or count > self._most_pieces):
                    limits = f"the limits are {self._most_pieces} pieces and {MAX_WHOLE_BYTES} bytes"
                    message = f"{count} pieces with {size} bytes are too much for one response"
                    raise HandlerFailed(f"{message}: {limits}; request a stream", 507)
                yield piece if last or count > 1 else self._first_of_stream(piece)
            if not last and self._closed:
                raise asyncio.CancelledError("the reply was closed before its end")
            if not last:
                raise GenerationFailed("the handler's stream ended early")
        except Exception as error:
            self._observer.failed(error)
            answer = self._own_answer(error)
            if answer is None:
                raise
        if answer is not None:
            yield answer
        else:
            self._observer.end()

    def when_arrived(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` once the first piece, an error or the end has arrived. The request must have begun."""
        assert self._job is not None
        self._job.when_arrived(callback)

    def arrived_whole(self) -> ResponsePiece | None:
        """Returns the answer if it consists of one piece, which has arrived; else None."""
        assert self._job is not None
        piece = self._job.only_piece
        if piece is not None:
            self._observer.piece(self._job.queued_s)
        return piece

    def answered(self) -> None:
        """Ends the request after the client was sent what ``arrived_whole`` has returned."""
        self._observer.end()
        self.close()

    def _first_of_stream(self, piece: ResponsePiece) -> ResponsePiece:
        return piece

    def _own_answer(self, error: Exception) -> ResponsePiece | None:
        """Returns the piece to send in place of an error; None if the error should be raised."""


class HandlerReply(PieceReader):
    """The reply to a V2 request: a stream of responses, or one whole response.

    ``binary`` names the outputs that a REST client wants as raw bytes; None means gRPC, where all BYTES are raw.
    """

    keep_alive = Spelling.keep_alive
    reads_following = False

    def __init__(
        self,
        request: HandlerRequest,
        reply: PieceEncoder,
        submit: Submit,
        observer: HandlerRequestObserver,
        binary: BinaryOutputs | None = None,
        most_pieces: int = MAX_WHOLE_PIECES,
    ) -> None:
        super().__init__(request, submit, observer, most_pieces)
        self.error: Exception | None = None  # set if the stream failed after its first response
        self._binary = binary
        self._reply = reply

    async def bodies(self) -> AsyncIterator[JsonObject]:
        """Yields the V2 responses of the stream."""
        async for piece in self.pieces():
            yield self._spelled(self._reply.piece(piece))

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """Returns the whole REST response, and the raw bytes that follow its JSON, or None. Raises RequestError."""
        binary = self._binary or BinaryOutputs()
        return attach_binary(as_rest(await self.whole(), binary), binary)

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        """Returns the final response of a stream that failed after its start; nothing if one was sent already."""
        return [] if self._reply.final_sent else [self._spelled(self._reply.failure(error))]

    def end(self) -> None:
        """Returns None: nothing follows the last response of a V2 stream."""

    def _spelled(self, body: JsonObject) -> JsonObject:
        return body if self._binary is None else as_rest(body)

    async def whole(self) -> JsonObject:
        """Returns all pieces as one response. Raises RequestError."""
        return self._reply.whole([piece async for piece in self.pieces(whole=True)])


class PredictionFailed(RequestError):
    """The handler's failure, with the status that TorchServe would send."""

    def __init__(self, failed: HandlerFailed) -> None:
        super().__init__(failed.message)
        self.status = failed.handlers_status
        self.shared = failed.shared


class PredictionReply(PieceReader):
    """A reply on TorchServe's own paths and services, where a stream has the header ``ts_stream_next``."""

    async def whole(self) -> bytes:
        """Returns the joined bytes of all pieces. Raises RequestError."""
        return b"".join([piece.value async for piece in self.pieces(whole=True)])

    def _first_of_stream(self, piece: ResponsePiece) -> ResponsePiece:
        return replace(piece, headers={**piece.headers, _STREAM_NEXT: "true"})

    def _own_answer(self, error: Exception) -> ResponsePiece | None:
        """Returns the handler's own answer if the handler has set an error status."""
        if not isinstance(error, HandlerFailed):
            return None
        if error.piece is None or error.piece.status != error.handlers_status:
            raise PredictionFailed(error) from None
        return error.piece


_JSON = "application/json"
_UNNAMED = ("", "application/x-www-form-urlencoded")  # curl sends the latter by default
_FORM = "multipart/form-data"
_OTHERWISE = (
    "name its content type (text/plain, image/png, application/octet-stream, …), or send it as the tensor `body` to "
    "infer or infer_stream"
)


class UnknownContentType(RequestError):
    """A handler cannot get a body of this content type."""

    status = 415


def read_posted(raw: bytes, content_type: str) -> dict[str, Any] | RequestPart:
    """Parses a posted body: JSON into an object, any other type into the part ``body``. Raises RequestError."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _FORM:
        raise UnknownContentType(
            f"content-type: {_FORM} is not implemented: send each field as a tensor of its name to infer or "
            "infer_stream, or the form to /predictions/{model}"
        )
    if kind != _JSON and kind not in _UNNAMED:
        return RequestPart("body", content_type, raw)
    try:
        parsed = parse_json(raw)
    except InvalidInput as error:
        if kind == _JSON:
            raise InvalidInput(error.field, f"{error.reason}: {_OTHERWISE}") from None
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    if kind in ("", _JSON):
        return RequestPart("body", content_type, raw)
    raise UnknownContentType(f"content-type: {kind} is read as a JSON object, which the body is not: {_OTHERWISE}")
