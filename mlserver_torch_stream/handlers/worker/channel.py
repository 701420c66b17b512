"""The worker's end of its connection to the server: sends pieces and failures, and records cancelled requests.

If a handler forks, the connection is closed in the child, so that the child can neither send nor keep the connection
open.
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
_NOT_SENT = {STREAM_NEXT, "content-type"}  # headers for which a piece has fields
TOO_LARGE = 507  # the status of a piece or a whole reply that is too large


@dataclass(frozen=True)
class SentPiece:
    """A piece of the response to one request. A piece with ``last`` is the final piece."""

    request_id: str
    value: bytes
    last: bool
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def bytes_to_send(self) -> int:
        """Returns an upper bound on the bytes that the piece takes in a message."""
        texts = (self.request_id, self.content_type, *self.headers.keys(), *self.headers.values())
        return bytes_in_frame(self.value, *texts)


class Channel:
    """The worker's end of its connection to the server. Any thread may send, and one thread reads. A message has at
    most ``most_bytes`` bytes.

    If a message cannot be sent, because the server has closed its end, ``lost`` is called and no error is raised.
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
        self._held: list[dict[str, Any]] | None = None  # messages that are sent with the next pieces
        self._cancelled: set[str] = set()
        self._shut = False
        os.register_at_fork(after_in_child=self._shut_in_child)

    @property
    def forked(self) -> bool:
        """True in a child process that a handler forked."""
        return os.getpid() != self.pid

    def read(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """Returns the next message from the server: its JSON header and its values; None at the end."""
        return self._reader.read_values()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message of this kind, with ``fields`` in its header."""
        self._send({"t": kind, **fields})

    def hold(self) -> None:
        """Holds back the messages that follow, until they are sent together with the next pieces."""
        with self._sending:
            self._held = self._held or []

    def pieces(
        self,
        pieces: Iterable[SentPiece],
        ended: Iterable[str] = (),
        skipped: Sequence[str] = (),
        took: float = 0.0,
    ) -> set[str]:
        """Sends the pieces, in as many messages as they need, and then tells the server which requests have ``ended``.

        ``skipped`` are the ended requests that the handler did not get, and ``took`` is the number of seconds that the
        handler needed for the others. The ids of ended requests may be reused. Returns the ids of the requests that
        failed because a piece does not fit into a message.
        """
        failed: set[str] = set()
        group: list[SentPiece] = []
        left = self._most_bytes
        for piece in pieces:
            size = piece.bytes_to_send()
            if size > self._most_bytes:
                limit = f"the limit for a piece and its headers is {self._most_bytes} bytes"
                message = f"a piece of {len(piece.value)} bytes is too large: {limit}; send it in parts"
                self.failed([piece.request_id], TOO_LARGE, message)
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
        """Reports that requests have failed.

        ``retry`` means that the failed requests ran as a batch, and may succeed if each is run alone.
        """
        if request_ids:
            message = message[:_MAX_MESSAGE_CHARS]
            self.send("failed", ids=list(request_ids), status=status, message=message, retry=retry)

    def expect(self, request_ids: Iterable[str]) -> None:
        """Called when requests begin; cancellations of earlier requests with the same ids no longer count."""
        self._cancelled.difference_update(request_ids)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Marks requests as cancelled, because their clients have disconnected."""
        self._cancelled.update(request_ids)

    def cancelled(self, request_id: str) -> bool:
        """Whether the request was cancelled."""
        return request_id in self._cancelled

    def _shut_in_child(self) -> None:
        """Closes the descriptor in a forked child.

        Closing the socket object would leave the descriptor open for the reader's file. A child of the child does not
        close it again, because there the number may belong to another file.
        """
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
                # In the header of the pieces, a metric needs no frame of its own.
                header["metrics"] = [held for held in self._held if held["t"] == "metric"]
                frames = [encode_frame(held) for held in self._held if held["t"] != "metric"]
            self._held = None
            try:
                self._connection.sendall(b"".join((*frames, encode_frame(header, body))))
            except OSError:
                self._lost()
