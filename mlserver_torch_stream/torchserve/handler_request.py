"""One request to a handler: what goes in, and the pieces that come out, for one reader.

Knows nothing of workers or batches, nor of how a request was spelled. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.torchserve.frames import bytes_in_frame

# Of one request's pieces that its client has not taken: from the first pair on, its worker has to wait where it works
# for nobody else; at the second the stream is cut, so that nobody else has to wait.
_MANY_BYTES, _MANY_PIECES = 1 << 20, 256
_MOST_BYTES, _MOST_PIECES = 16 << 20, 16384


class HandlerFailed(RequestError):
    """The handler raised, gave what cannot be sent, or died. ``status``: TorchServe's, where our table has it."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = allowed_status(status)


class RequestTooLarge(RequestError):
    """More than a worker can be sent."""

    status = 413


class ClientLags(RequestError):
    """The client does not read what the handler sends."""

    status = 500


def allowed_status(status: int) -> int:
    """A handler's own status. 400 and 404 would tell Seldon Core 2 that the model is not loaded."""
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
    """A request as a handler sees it. ``timeout_s``: from its arrival to its last piece."""

    request_id: str
    parts: Sequence[RequestPart]
    headers: Mapping[str, str] = field(default_factory=dict)
    sequence_id: str | None = None
    sequence_end: bool = False
    timeout_s: float | None = None

    def bytes_to_send(self) -> int:
        """Of the message that carries it to a worker, at most."""
        parts = (bytes_in_frame(part.value, part.name, part.content_type) for part in self.parts)
        return sum(parts) + bytes_in_frame(b"", self.request_id, *self.headers.keys(), *self.headers.values())


@dataclass(frozen=True, slots=True)
class ResponsePiece:
    value: bytes
    last: bool
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class HandlerJob:
    """A stream of pieces that ends once: with a last piece, with an error, or because its reader closed it.

    A job that has failed together with others may be run again, alone: pieces that come again are checked against those
    that have been delivered, and not delivered twice.
    """

    def __init__(self, request: HandlerRequest, key: str, arrived: float, closed: Callable[[HandlerJob], None]) -> None:
        self.request = request
        self.key = key  # its id for the handler: unique among those that run
        self.arrived = arrived
        self.bytes = request.bytes_to_send()
        self.over = False  # nothing more is delivered
        self.alone = False  # is in no batch with others: it will not be run again
        self.closes_sequence = False  # its handler says so
        self.again: RequestError | None = None  # why it is to be run again
        self.signed = arrived  # when its worker last gave a sign of it
        self.deadline: asyncio.TimerHandle | None = None
        self.drained: Callable[[], None] | None = None  # is called once, when little waits
        self._closed = closed
        self._pieces: deque[ResponsePiece] = deque()
        self._bytes = 0
        self._error: RequestError | None = None
        self._delivered: list[bytes] = []  # digests, in case that it has to be run again
        self._repeating = 0  # of those, how many have come again
        self._came = asyncio.Event()

    def deliver(self, piece: ResponsePiece) -> None:
        if self.over:
            return
        if self._repeating < len(self._delivered):
            self._repeat(_digest(piece))
            return
        if not self.alone:
            self._delivered.append(_digest(piece))
            self._repeating += 1
        self._pieces.append(piece)
        self._bytes += len(piece.value)
        self.over = piece.last
        self._came.set()

    @property
    def lags(self) -> bool:
        """Its reader is behind."""
        return self._bytes > _MANY_BYTES or len(self._pieces) > _MANY_PIECES

    def cut_if_far_behind(self) -> None:
        """The newest piece does not count: its reader has had no time to take it, however large it is."""
        if self._bytes - len(self._pieces[-1].value) > _MOST_BYTES or len(self._pieces) > _MOST_PIECES:
            self._pieces.clear()
            self.over = False  # even if all has come: it will not all be read
            self.fail(ClientLags(f"the client has not read {self._bytes} bytes: its stream is cut"))
            self.close()

    def fail(self, error: RequestError) -> None:
        if not self.over:
            self.over = True
            self._error = error
            self._came.set()
            self._tell_drained()  # what comes for it now is dropped

    def run_again(self) -> None:
        """From its beginning, alone, whatever has been delivered."""
        self.alone = True
        self._repeating = 0

    def close(self) -> None:
        """Nobody reads on. Synchronous, idempotent, safe from any task."""
        self.over = True
        self._closed(self)
        self._came.set()
        self._tell_drained()

    def __aiter__(self) -> HandlerJob:
        return self

    async def __anext__(self) -> ResponsePiece:
        """Raises RequestError once, after the pieces that came before it."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.over:
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        piece = self._pieces.popleft()
        self._bytes -= len(piece.value)
        if not self.lags:
            self._tell_drained()
        return piece

    def _tell_drained(self) -> None:
        drained, self.drained = self.drained, None
        if drained is not None:
            drained()

    def _repeat(self, digest: bytes) -> None:
        same = self._delivered[self._repeating] == digest
        self._repeating += 1
        if not same:
            assert self.again is not None
            self.fail(HandlerFailed(f"{self.again.message} (and run again alone it began differently)"))
            self.close()


def _digest(piece: ResponsePiece) -> bytes:
    return hashlib.blake2b(piece.value, digest_size=8).digest()
