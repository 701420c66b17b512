"""Parses server-sent events.

Knows nothing of what they carry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A whole answer in one event, with log-probabilities and alternatives for every token, has some 30 MB.
MOST_EVENT_BYTES = 64 * 2**20
# A lone \r at the end of a chunk may be half of \r\n: it is kept for the next chunk.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class EventParser:
    """Parses a ``text/event-stream`` body, in chunks of any size, into the data of its events.

    ``most_bytes`` bounds what is kept of one event: its lines so far, and one that has no end yet.
    """

    def __init__(self, most_bytes: int = MOST_EVENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept_bytes = 0
        self._line = bytearray()  # that has no end yet
        self._half_end = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Must be read to its end. Raises ValueError, after the events before it, at a line that is not UTF-8 and at
        an event that has more than ``most_bytes``."""
        *ended, rest = _LINE_END.split(self._half_end + chunk)
        self._half_end = b"\r" if rest.endswith(b"\r") else b""
        for piece in ended:
            self._keep(piece)
            line, self._line = self._line, bytearray()
            if line:
                self._field(line.decode("utf-8"))
            else:
                event, self._data, self._kept_bytes = self._data, [], 0
                if event:
                    yield "\n".join(event)
        self._keep(rest.removesuffix(b"\r"))

    def _keep(self, piece: bytes) -> None:
        self._kept_bytes += len(piece)
        if self._kept_bytes > self._most_bytes:
            raise ValueError(f"an event has more than {self._most_bytes} bytes")
        self._line += piece

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
