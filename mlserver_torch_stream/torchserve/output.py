"""What a worker writes to its standard output and error, line by line into the log, within bounds.

Knows nothing of what is written. A worker that writes without end is made to wait by its pipe, and most of it is
dropped: the server's log and CPU are not at its mercy.
"""

from __future__ import annotations

import logging
import os
import threading
import time

logger = logging.getLogger(__name__)
_LINES_PER_S = 100
_BYTES_PER_S = 4 << 20
_MOST_LINE_BYTES = 4096
_CHUNK = 1 << 16


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
        self._bytes = 0
        self._lines = 0
        self._dropped = 0

    def run(self) -> None:
        try:
            while chunk := os.read(self._descriptor, _CHUNK):
                self._take(chunk)
                self._rest_a_while()
            self._line(self._rest)
            self._tell_dropped()
        finally:
            os.close(self._descriptor)

    def _take(self, chunk: bytes) -> None:
        self._bytes += len(chunk)
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

    def _rest_a_while(self) -> None:
        """A new second has a new allowance; one whose allowance is spent is waited for."""
        passed = time.monotonic() - self._began
        if passed < 1 and self._bytes > _BYTES_PER_S:
            time.sleep(1 - passed)
            passed = 1
        if passed >= 1:
            self._tell_dropped()
            self._began, self._bytes, self._lines = time.monotonic(), 0, 0

    def _tell_dropped(self) -> None:
        if self._dropped:
            logger.warning("%s: %d more lines dropped, at most %d/s are kept", self._name, self._dropped, _LINES_PER_S)
            self._dropped = 0
