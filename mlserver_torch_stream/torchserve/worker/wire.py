"""Reads TorchServe's binary format of a response, which its ``create_predict_response`` writes.

Knows nothing of where responses go. All integers are big-endian 32-bit; a length of -1 ends the list.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mlserver_torch_stream.torchserve.worker.channel import STREAM_NEXT, SentPiece

_INT = struct.Struct("!i")


@dataclass(frozen=True)
class Response:
    """What TorchServe would send to its frontend: a piece for each of several requests."""

    code: int
    message: str
    pieces: list[SentPiece]


def parse(message: bytes | bytearray) -> Response:
    """Raises ValueError."""
    cursor = _Cursor(memoryview(message))
    code = cursor.integer()
    text = cursor.text()
    pieces = []
    while (length := cursor.integer()) >= 0:
        request_id = cursor.take(length).decode()
        content_type = cursor.text()
        status = cursor.integer()
        cursor.text()  # the reason phrase, which no protocol of ours carries
        headers = {cursor.text(): cursor.text() for _ in range(cursor.integer())}
        value = cursor.take(cursor.integer())
        last = headers.get(STREAM_NEXT) == "false"
        pieces.append(SentPiece(request_id, value, last, content_type, status, headers))
    return Response(code, text, pieces)


class _Cursor:
    def __init__(self, message: memoryview) -> None:
        self._message = message
        self._position = 0

    def integer(self) -> int:
        return int(_INT.unpack(self.take(_INT.size))[0])

    def text(self) -> str:
        return self.take(self.integer()).decode()

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._message):
            raise ValueError("a response that is cut off")
        taken = bytes(self._message[self._position : end])
        self._position = end
        return taken
