"""TorchServe's own binary spelling of a response, read: what its ``create_predict_response`` makes.

Knows nothing of where it goes. All integers are big-endian 32-bit; a length of -1 ends the list.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_INT = struct.Struct("!i")


@dataclass(frozen=True)
class Prediction:
    """One request's part of a response."""

    request_id: str
    content_type: str
    status: int
    headers: dict[str, str]
    value: bytes


@dataclass(frozen=True)
class Response:
    code: int
    message: str
    predictions: list[Prediction]


def parse(message: bytes | bytearray) -> Response:
    """Raises ValueError."""
    cursor = _Cursor(memoryview(message))
    code = cursor.integer()
    text = cursor.text()
    predictions = []
    while (length := cursor.integer()) >= 0:
        request_id = cursor.take(length).decode()
        content_type = cursor.text()
        status = cursor.integer()
        cursor.text()  # the reason phrase, which no protocol of ours carries
        headers = {cursor.text(): cursor.text() for _ in range(cursor.integer())}
        predictions.append(Prediction(request_id, content_type, status, headers, cursor.take(cursor.integer())))
    return Response(code, text, predictions)


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
