"""Parses server-sent events.

Knows nothing of what they carry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A lone \r at the end of a chunk may be half of \r\n: it is kept for the next chunk.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class EventParser:
    """Parses a ``text/event-stream`` body, in chunks of any size, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Must be read to its end. Raises ValueError at a line that is not UTF-8, behind the events before it."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        for line in lines:
            if line:
                self._field(line.decode("utf-8"))
            elif self._data:
                event = "\n".join(self._data)
                self._data = []
                yield event

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
