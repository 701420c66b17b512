"""The worker's end of its connection: sends pieces and failures, and knows which requests were cancelled.

In a process that a handler forks the connection is closed at the fork, so that the process can neither send nor keep
the connection open.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.handlers.frames import MAX_BYTES, FrameReader, bytes_in_frame, encode_frame

_MAX_MESSAGE_CHARS = 2000
STREAM_NEXT = "ts_stream_next"
_NOT_SENT = {STREAM_NEXT, "content-type"}  # headers that a piece has as fields of its own
TOO_LARGE = 507  # the status of a whole reply that is too large, too


@dataclass(frozen=True)
class SentPiece:
    """A piece of the response to one request. ``last``: no piece follows."""

    request_id: str
    value: bytes
    last: bool
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def bytes_to_send(self) -> int:
        """The most bytes that the piece takes of a message."""
        texts = (self.request_id, self.content_type, *self.headers.keys(), *self.headers.values())
        return bytes_in_frame(self.value, *texts)


class Channel:
    """Sends from any thread; reads in one. A message has at most ``most_bytes``.

    ``lost`` is called in place of an error if a message cannot be sent because the server has closed its end.
    """

    def __init__(
        self, connection: socket.socket, most_bytes: int = MAX_BYTES, *, lost: Callable[[], object] = lambda: None
    ) -> None:
        self.pid = os.getpid()
        self._lost = lost
        self._connection = connection
        self._most_bytes = most_bytes
        self._reader = FrameReader(connection)
        self._sending = threading.Lock()
        self._held: list[dict[str, Any]] | None = None  # messages that leave with the next pieces
        self._cancelled: set[str] = set()
        self._shut = False
        os.register_at_fork(after_in_child=self._shut_in_child)

    @property
    def forked(self) -> bool:
        """True in a child that a handler forked."""
        return os.getpid() != self.pid

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        return self._reader.read()

    def send(self, kind: str, **fields: Any) -> None:
        self._send({"t": kind, **fields})

    def hold(self) -> None:
        """Keeps what is sent from now on until the next pieces, and sends all of it with them."""
        with self._sending:
            self._held = self._held or []

    def pieces(
        self,
        pieces: Iterable[SentPiece],
        ended: Iterable[str] = (),
        skipped: Sequence[str] = (),
        took: float = 0.0,
    ) -> set[str]:
        """Sends the pieces in as many messages as they need, and then that the requests ``ended`` are over.

        ``skipped`` are those of the ended requests that the handler did not get; ``took`` is how many seconds it needed
        for the others. The ids of ended requests may be used again. Returns the requests that have failed because their
        piece does not fit into a message.
        """
        failed: set[str] = set()
        group: list[SentPiece] = []
        left = self._most_bytes
        for piece in pieces:
            size = piece.bytes_to_send()
            if size > self._most_bytes:
                self.failed(
                    [piece.request_id], TOO_LARGE, f"a piece of {len(piece.value)} bytes is too large: send parts"
                )
                failed.add(piece.request_id)
                continue
            if size > left:
                self._send_pieces(group)
                group, left = [], self._most_bytes
            group.append(piece)
            left -= size
        over = list(ended)
        self._cancelled.difference_update(over)
        self._send_pieces(group, ended=over, skipped=skipped, took=took)
        return failed

    def _send_pieces(self, pieces: Sequence[SentPiece], **end: Any) -> None:
        items = [
            {
                "id": each.request_id,
                "n": len(each.value),
                "last": each.last,
                "ct": each.content_type,
                "status": each.status,
                "headers": {name: text for name, text in each.headers.items() if name not in _NOT_SENT},
            }
            for each in pieces
        ]
        self._send({"t": "pieces", "items": items, **end}, b"".join(each.value for each in pieces))

    def failed(self, request_ids: Collection[str], status: int, message: str, retry: bool = False) -> None:
        """``retry``: the requests were a batch, and may succeed one by one."""
        if request_ids:
            message = message[:_MAX_MESSAGE_CHARS]
            self.send("failed", ids=list(request_ids), status=status, message=message, retry=retry)

    def expect(self, request_ids: Iterable[str]) -> None:
        """The requests begin: a cancellation of an earlier request with the same id is void."""
        self._cancelled.difference_update(request_ids)

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._cancelled.update(request_ids)

    def cancelled(self, request_id: str) -> bool:
        return request_id in self._cancelled

    def _shut_in_child(self) -> None:
        """Closes the descriptor: closing the socket would leave it open for the reader's file. A child's own child does
        not close it again, as the number may be that of another file there."""
        if not self._shut:
            self._shut = True
            os.close(self._connection.fileno())

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if self.forked:
            return
        with self._sending:
            if self._held is not None and header["t"] != "pieces":
                self._held.append(header)
                return
            frames = []
            if self._held:
                header["metrics"] = [held for held in self._held if held["t"] == "metric"]  # a frame less each
                frames = [encode_frame(held) for held in self._held if held["t"] != "metric"]
            self._held = None
            try:
                self._connection.sendall(b"".join((*frames, encode_frame(header, body))))
            except OSError:
                self._lost()
