"""What a worker writes to its standard output and error, line by line into the log, within bounds.

Knows nothing of what is written. The pipe is read as fast as a worker writes, so that printing never stops a handler;
lines beyond the allowance of a second are counted and dropped, so that the log is not at its mercy.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

logger = logging.getLogger(__name__)
_LINES_PER_S = 100
_MOST_LINE_BYTES = 4096
_CHUNK = 1 << 16
_ENDED = select.POLLIN | select.POLLHUP


def drain(descriptor: int, name: str) -> threading.Thread:
    """Reads until the last writer has closed it, in a thread of its own, and closes it."""
    thread = threading.Thread(target=_Drain(descriptor, name).run, name=f"output of {name}", daemon=True)
    thread.start()
    return thread


class _Drain:
    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self._rest = b""
        self._began = time.monotonic()  # of the current second
        self._lines = 0
        self._dropped = 0

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, _ENDED)
        try:
            while True:
                if poll.poll(self._milliseconds_left() if self._dropped else None):
                    chunk = os.read(self._descriptor, _CHUNK)
                    if not chunk:
                        break
                    self._take(chunk)
                if self._milliseconds_left() == 0:
                    self._next_second()
            self._line(self._rest)
            self._tell_dropped()
        finally:
            os.close(self._descriptor)

    def _take(self, chunk: bytes) -> None:
        if self._lines >= _LINES_PER_S:  # counted without being split: the server's CPU is not at its mercy either
            ends = chunk.count(b"\n")
            self._dropped += ends
            self._rest = ((b"" if ends else self._rest) + chunk[chunk.rfind(b"\n") + 1 :])[:_MOST_LINE_BYTES]
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        self._rest = rest[:_MOST_LINE_BYTES]

    def _line(self, line: bytes) -> None:
        if not line:
            return
        if self._lines >= _LINES_PER_S:
            self._dropped += 1
            return
        self._lines += 1
        logger.info("%s: %s", self._name, line[:_MOST_LINE_BYTES].decode(errors="backslashreplace"))

    def _milliseconds_left(self) -> int:
        """Of the current second, rounded up."""
        return max(0, int(1000 * (self._began + 1 - time.monotonic()) + 0.999))

    def _next_second(self) -> None:
        self._tell_dropped()
        self._began, self._lines = time.monotonic(), 0

    def _tell_dropped(self) -> None:
        if self._dropped:
            logger.warning("%s: %d more lines dropped, at most %d/s are kept", self._name, self._dropped, _LINES_PER_S)
            self._dropped = 0
