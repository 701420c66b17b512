"""One request to a handler, its job in the pool, and the stream of response pieces that one reader takes.

All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.handlers.frames import bytes_in_frame

# Limits for the pieces of one request that its client has not taken. Above the first pair a worker that runs no other
# request waits for the client; above the second pair the stream is cut, so that no other request has to wait.
_MANY_BYTES, _MANY_PIECES = 1 << 20, 256
_MAX_BYTES, _MAX_PIECES = 16 << 20, 16384


class HandlerFailed(RequestError):
    """The handler raised, returned a value that cannot be sent, or died. The handler may set another status.

    ``handlers_status`` is that of TorchServe, and ``status`` what V2 allows of it. ``piece``: the handler's own answer,
    where it set a status of 400 or more.
    """

    status = 503

    def __init__(self, message: str, status: int = 503, piece: ResponsePiece | None = None) -> None:
        super().__init__(message)
        self.status = allowed_status(status)
        self.handlers_status = status if 400 <= status < 600 else 503
        self.piece = piece


class WorkerLost(HandlerFailed):
    """The worker died, or was killed, while it ran the request, perhaps because of another request of its batch."""

    shared = True


class RequestTooLarge(RequestError):
    """The request does not fit into one message to a worker."""

    status = 413


class ClientLags(RequestError):
    """The client reads more slowly than the handler sends."""

    status = 500


def allowed_status(status: int) -> int:
    """A handler's own status. At 400 and 404 Seldon Core 2 would take the model for not loaded."""
    if status in (400, 404):
        return 422
    return status if 400 <= status < 600 else 503


@dataclass(frozen=True, slots=True)
class RequestPart:
    """One field of a request: the body, or a form's field."""

    name: str
    content_type: str
    value: bytes


@dataclass(frozen=True, slots=True)
class HandlerRequest:
    """A request as a handler sees it. ``timeout_s``: from its arrival to its last piece.

    ``whole_sequence``: a worker sees the sequence from its first request on, each request once, or not at all. A
    ``sequence_open`` request is refused unless a worker holds the sequence, and one that fails is not run again and
    ends the sequence.
    """

    request_id: str
    parts: Sequence[RequestPart]
    headers: Mapping[str, str] = field(default_factory=dict)
    sequence_id: str | None = None
    sequence_end: bool = False
    timeout_s: float | None = None
    whole_sequence: bool = False
    sequence_open: bool = False

    def bytes_to_send(self) -> int:
        """The most bytes of the message that carries the request to a worker."""
        parts = (bytes_in_frame(part.value, part.name, part.content_type) for part in self.parts)
        return sum(parts) + bytes_in_frame(b"", self.request_id, *self.headers.keys(), *self.headers.values())


@dataclass(frozen=True, slots=True)
class ResponsePiece:
    """One piece of a handler's answer, with the status and headers that it asks for. ``last``: no other follows."""

    value: bytes
    last: bool
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class PieceStream:
    """The pieces of one response on their way to its reader. It ends once: with a last piece, an error, or a close."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self.over = False  # True: no more pieces are delivered
        self.queued_s: float | None = None  # until the request was sent to a worker for the first time
        self.drained: Callable[[], None] | None = None  # called once, when the reader has caught up
        self._closed = closed
        self._pieces: deque[ResponsePiece] = deque()
        self._bytes = 0
        self._error: RequestError | None = None
        self._changed = asyncio.Event()

    def put(self, piece: ResponsePiece) -> None:
        if not self.over:
            self._pieces.append(piece)
            self._bytes += len(piece.value)
            self.over = piece.last
            self._changed.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def lags(self) -> bool:
        """True if the reader has many pieces still to read."""
        return self._bytes > _MANY_BYTES or len(self._pieces) > _MANY_PIECES

    def cut_if_far_behind(self) -> None:
        """Ends the stream if its reader has too much still to read, apart from the newest piece."""
        if self._bytes - len(self._pieces[-1].value) > _MAX_BYTES or len(self._pieces) > _MAX_PIECES:
            self._pieces.clear()
            self.over = False  # also where the last piece is there: the reader does not get it
            self.fail(ClientLags(f"the client has not read {self._bytes} bytes: its stream is closed"))
            self.close()

    def fail(self, error: RequestError) -> None:
        if not self.over:
            self.over = True
            self._error = error
            self._changed.set()
            self._call_drained()  # pieces that arrive from now on are dropped

    def close(self) -> None:
        """The reader takes no more pieces. Synchronous, idempotent, safe from any task."""
        self.over = True
        self._closed()
        self._changed.set()
        self._call_drained()

    def __aiter__(self) -> PieceStream:
        return self

    async def __anext__(self) -> ResponsePiece:
        """Raises the stream's error after the pieces that were delivered before it."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._bytes -= len(piece.value)
        if not self.lags:
            self._call_drained()
        return piece

    def _call_drained(self) -> None:
        drained, self.drained = self.drained, None
        if drained is not None:
            drained()


class HandlerJob:
    """One request on its way through the queue and a worker. ``closed`` is called when the reader closes the stream.

    A job that failed in a batch may be run again, alone. Its pieces are then compared with those that were delivered
    before, and no piece is delivered twice.
    """

    def __init__(self, request: HandlerRequest, key: str, arrived: float, closed: Callable[[HandlerJob], None]) -> None:
        self.request = request
        self.key = key  # the request's id for the handler: unique among the jobs that run
        self.arrived = arrived
        self.bytes = request.bytes_to_send()
        self.stream = PieceStream(partial(closed, self))
        self.alone = False  # True: it is the only job of its batch, and is not run again
        self.closes_sequence = False  # True: the handler has ended the job's sequence
        self.retry: RequestError | None = None  # the error after which the job is run again
        self.active_at = arrived  # the time of its last piece
        self.deadline: asyncio.TimerHandle | None = None
        self._delivered: list[bytes] = []  # digests, in case the job is run again
        self._repeated = 0  # how many of them have arrived again

    def begin(self, now: float) -> None:
        """A worker begins to run the job."""
        self.active_at = now
        if self.stream.queued_s is None:
            self.stream.queued_s = now - self.arrived

    def deliver(self, piece: ResponsePiece) -> None:
        if self.stream.over:
            return
        if self._repeated < len(self._delivered):
            self._repeat(_digest(piece))
            return
        if not self.alone:
            self._delivered.append(_digest(piece))
            self._repeated += 1
        self.stream.put(piece)

    def run_again(self) -> None:
        """Starts the job from its beginning, alone."""
        self.alone = True
        self._repeated = 0

    def _repeat(self, digest: bytes) -> None:
        same = self._delivered[self._repeated] == digest
        self._repeated += 1
        if not same:
            assert self.retry is not None
            self.stream.fail(HandlerFailed(f"{self.retry.message} (and run again alone it began differently)"))
            self.stream.close()


def _digest(piece: ResponsePiece) -> bytes:
    return hashlib.blake2b(piece.value, digest_size=8).digest()
