"""The worker's end of its connection: pieces and failures out, and who does not wait for them any more.

Knows nothing of handlers. A process that a handler forks is nobody here: its end is closed at the fork, so that it can
neither send nor keep the connection open.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.torchserve.frames import MOST_BYTES, FrameReader, bytes_in_frame, encode_frame

_MOST_MESSAGE_CHARS = 2000
TOO_LARGE = 507  # as where the pieces of a whole answer are too much


@dataclass(frozen=True)
class SentPiece:
    """What a handler gave for one request. ``last``: nothing follows."""

    request_id: str
    value: bytes
    last: bool
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def bytes_to_send(self) -> int:
        """Of the message that carries it, at most."""
        texts = (self.request_id, self.content_type, *self.headers.keys(), *self.headers.values())
        return bytes_in_frame(self.value, *texts)


class Channel:
    """Sends from any thread; reads in one. A message has at most ``most_bytes``."""

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        self.pid = os.getpid()
        self._connection = connection
        self._most_bytes = most_bytes
        self._reader = FrameReader(connection)
        self._sending = threading.Lock()
        self._gone: set[str] = set()
        self._shut = False
        os.register_at_fork(after_in_child=self._shut_in_child)

    @property
    def forked(self) -> bool:
        """True in a child that a handler forked."""
        return os.getpid() != self.pid

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        return self._reader.read()

    def tell(self, kind: str, **fields: Any) -> None:
        self._send({"t": kind, **fields})

    def pieces(self, pieces: Iterable[SentPiece], ended: Iterable[str] = ()) -> set[str]:
        """``ended``: the requests that the handler has done with, after these pieces. Their ids may come again.

        In as many messages as it needs. Returns the requests that have failed: their piece does not go into one.
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
                self._send_pieces(group, ())
                group, left = [], self._most_bytes
            group.append(piece)
            left -= size
        over = list(ended)
        self._gone.difference_update(over)
        self._send_pieces(group, over)
        return failed

    def _send_pieces(self, pieces: Sequence[SentPiece], ended: Sequence[str]) -> None:
        items = [
            {
                "id": each.request_id,
                "n": len(each.value),
                "last": each.last,
                "ct": each.content_type,
                "status": each.status,
                "headers": dict(each.headers),
            }
            for each in pieces
        ]
        self._send({"t": "pieces", "items": items, "ended": ended}, b"".join(each.value for each in pieces))

    def failed(self, request_ids: Collection[str], status: int, message: str, again: bool = False) -> None:
        """``again``: they may do better one by one."""
        if request_ids:
            told = message[:_MOST_MESSAGE_CHARS]
            self.tell("failed", ids=list(request_ids), status=status, message=told, again=again)

    def expect(self, request_ids: Iterable[str]) -> None:
        """They begin. Who left an earlier request of the same id after its end has not left this one."""
        self._gone.difference_update(request_ids)

    def leave(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        self._gone.update(request_ids)

    def gone(self, request_id: str) -> bool:
        return request_id in self._gone

    def _shut_in_child(self) -> None:
        """The descriptor itself: closing the socket would leave it open for the reader's file. Not again in a child's
        own child, where the number may be somebody else's."""
        if not self._shut:
            self._shut = True
            os.close(self._connection.fileno())

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if self.forked:
            return
        with self._sending:
            self._connection.sendall(encode_frame(header, body))
