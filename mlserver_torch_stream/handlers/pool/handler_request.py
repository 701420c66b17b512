"""One request to a handler, its job in the pool, and the stream of its response pieces, which has one reader.

Everything here runs on the event loop's thread.
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

# Limits for the pieces of one request that its client has not read. Above _MANY the worker waits for the client if it
# runs no other request. Above _MAX the stream is ended, so that no other request has to wait.
_MANY_BYTES, _MANY_PIECES = 1 << 20, 256
_MAX_BYTES, _MAX_PIECES = 16 << 20, 16384


class HandlerFailed(RequestError):
    """The handler raised an exception, returned a value that cannot be sent, or died.

    ``handlers_status`` is the status that the handler set, or TorchServe's default; ``status`` is the status that V2
    allows for it. ``piece`` is the handler's own answer if it set a status of 400 or more.
    """

    status = 503

    def __init__(self, message: str, status: int = 503, piece: ResponsePiece | None = None) -> None:
        super().__init__(message)
        self.status = allowed_status(status)
        self.handlers_status = status if 400 <= status < 600 else 503
        self.piece = piece


class WorkerLost(HandlerFailed):
    """The worker died or was killed while it ran the request; another request of the batch may be the cause."""

    shared = True


class RequestTooLarge(RequestError):
    """The request does not fit into one message to a worker."""

    status = 413


class ClientLags(RequestError):
    """The client reads more slowly than the handler sends."""

    status = 500


def allowed_status(status: int) -> int:
    """Returns the status that V2 sends for a handler's own. 400 and 404 are replaced, because Seldon Core 2 would
    reload the model.
    """
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
    """A request as a handler sees it. ``timeout_s`` limits the time from the request's arrival to its last piece.

    If ``whole_sequence`` is true, the worker must see every request of the sequence exactly once, from the first on.
    Then a request with ``sequence_open`` is refused unless a worker holds the sequence, and a request that fails is not
    run again but ends the sequence.
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
        """Returns an upper bound on the bytes that the request takes in a message to a worker."""
        parts = [bytes_in_frame(part.value, part.name, part.content_type) for part in self.parts]
        return sum(parts) + bytes_in_frame(b"", self.request_id, *self.headers.keys(), *self.headers.values())


@dataclass(frozen=True, slots=True)
class ResponsePiece:
    """One piece of a handler's answer, with the status and headers that the handler set.

    A piece with ``last`` is the final piece of the answer.
    """

    value: bytes
    last: bool
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class PieceStream:
    """The pieces of one response on their way to its reader. It ends once: with a last piece, an error, or a close."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self.over = False  # True: no more pieces are delivered
        self.queued_s: float | None = None  # seconds from the request's arrival to its first start in a worker
        self.drained: Callable[[], None] | None = None  # called once when the reader no longer lags
        self._closed: Callable[[], None] | None = closed
        self._pieces: deque[ResponsePiece] = deque()
        self._bytes = 0
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader

    def put(self, piece: ResponsePiece) -> None:
        """Adds a piece for the reader; does nothing if the stream is over."""
        if not self.over:
            self._pieces.append(piece)
            self._bytes += len(piece.value)
            self.over = piece.last
            self._wake()

    @property
    def failed(self) -> bool:
        """True if the stream has ended with an error."""
        return self._error is not None

    @property
    def lags(self) -> bool:
        """True if many pieces, or many bytes, wait for the reader."""
        return self._bytes > _MANY_BYTES or len(self._pieces) > _MANY_PIECES

    def cut_if_far_behind(self) -> None:
        """Ends the stream if too many pieces, or too many bytes besides the newest piece, wait for the reader."""
        if self._bytes - len(self._pieces[-1].value) > _MAX_BYTES or len(self._pieces) > _MAX_PIECES:
            waiting = f"{self._bytes} bytes in {len(self._pieces)} pieces"
            limits = f"the limits are {_MAX_BYTES} bytes besides the newest piece, and {_MAX_PIECES} pieces"
            self._pieces.clear()
            self.over = False  # set even after the last piece, which the reader no longer gets
            self.fail(ClientLags(f"the client has not read {waiting} ({limits}): its stream is closed"))
            self.close()

    def fail(self, error: RequestError) -> None:
        """Ends the stream with the error, unless it is over."""
        if not self.over:
            self.over = True
            self._error = error
            self._wake()
            self._call_drained()  # pieces that arrive from now on are dropped

    def close(self) -> None:
        """Called when the reader wants no more pieces. Does not await, and may be called more than once and in any
        task.
        """
        self.over = True
        closed, self._closed = self._closed, None  # it refers to the job, which refers to this stream
        if closed is not None:
            closed()
        self._wake()
        self._call_drained()

    @property
    def only_piece(self) -> ResponsePiece | None:
        """The whole response, if it consists of one piece that has arrived and was not read; else None."""
        first = self._pieces[0] if self._pieces else None
        return first if first is not None and first.last and self._error is None else None

    def when_arrived(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` in a turn of the event loop after a piece, an error or the end has arrived."""
        loop = asyncio.get_running_loop()
        if self._pieces or self.over:
            loop.call_soon(callback)
        else:
            self._waiter = loop.create_future()
            self._waiter.add_done_callback(lambda _: callback())

    def __aiter__(self) -> PieceStream:
        return self

    async def __anext__(self) -> ResponsePiece:
        """Waits for the next piece. The error of a failed stream is raised after all pieces before it were read."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._pieces.popleft()
        self._bytes -= len(piece.value)
        if not self.lags:
            self._call_drained()
        return piece

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _call_drained(self) -> None:
        drained, self.drained = self.drained, None
        if drained is not None:
            drained()


class HandlerJob:
    """One request on its way through the queue and a worker. ``closed`` is called when the reader closes the stream.

    A job that failed in a batch may be run again, alone. Its pieces are then compared with the pieces that were
    delivered before, and no piece is delivered twice.
    """

    def __init__(self, request: HandlerRequest, key: str, arrived: float, closed: Callable[[HandlerJob], None]) -> None:
        self.request = request
        self.key = key  # the request id that the handler sees, unique among the running jobs
        self.arrived = arrived
        self.bytes = request.bytes_to_send()
        self.stream = PieceStream(partial(closed, self))
        self.alone = False  # True: the job is alone in its batch, so it is not run again if it fails
        self.closes_sequence = False  # True: the handler has ended the job's sequence
        self.retry: RequestError | None = None  # the error after which the job is run again
        self.active_at = arrived  # the time of its last piece
        self.deadline: asyncio.TimerHandle | None = None
        self._delivered: list[bytes] = []  # digests of the pieces, in case the job is run again
        self._repeated = 0  # how many of these pieces the second run has sent again

    def begin(self, now: float) -> None:
        """Called when a worker begins to run the job."""
        self.active_at = now
        if self.stream.queued_s is None:
            self.stream.queued_s = now - self.arrived

    def deliver(self, piece: ResponsePiece) -> None:
        """Passes a piece on to the reader, unless the job's first run delivered it before."""
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
            self.stream.fail(
                HandlerFailed(f"{self.retry.message} (when it was run again alone, its answer began differently)")
            )
            self.stream.close()


def _digest(piece: ResponsePiece) -> bytes:
    return hashlib.blake2b(piece.value, digest_size=8).digest()
