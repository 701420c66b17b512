"""Logs the output of a process at a limited rate.

Control characters of the output are escaped, so that the process can neither forge a line nor control a terminal. The
pipe is read as fast as the process writes, so that printing never blocks it. If a second has more than 100 lines, the
rest is counted and dropped.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from mlserver_torch_stream.log_text import log_text

logger = logging.getLogger(__name__)
_LINES_PER_S = 100
_MAX_LINE_BYTES = 4096
_CHUNK = 1 << 16
_ENDED = select.POLLIN | select.POLLHUP


def drain(descriptor: int, name: str) -> threading.Thread:
    """Starts a thread that reads until the last writer has closed the pipe, and then closes the descriptor."""
    thread = threading.Thread(target=_Drain(descriptor, name).run, name=f"output of {name}", daemon=True)
    thread.start()
    return thread


class _Drain:
    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self._rest = b""
        self._began = time.monotonic()  # the start of the current second
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
            self._log_dropped()
        finally:
            os.close(self._descriptor)

    def _take(self, chunk: bytes) -> None:
        if self._lines >= _LINES_PER_S:  # lines are counted without being split, which saves the server's CPU
            ends = chunk.count(b"\n")
            self._dropped += ends
            self._rest = ((b"" if ends else self._rest) + chunk[chunk.rfind(b"\n") + 1 :])[:_MAX_LINE_BYTES]
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        self._rest = rest[:_MAX_LINE_BYTES]

    def _line(self, line: bytes) -> None:
        if not line:
            return
        if self._lines >= _LINES_PER_S:
            self._dropped += 1
            return
        self._lines += 1
        text = line[:_MAX_LINE_BYTES].removesuffix(b"\r").decode(errors="backslashreplace")
        logger.info("%s: %s", self._name, log_text(text))

    def _milliseconds_left(self) -> int:
        """Returns the rest of the current second, rounded up."""
        return max(0, int(1000 * (self._began + 1 - time.monotonic()) + 0.999))

    def _next_second(self) -> None:
        self._log_dropped()
        self._began, self._lines = time.monotonic(), 0

    def _log_dropped(self) -> None:
        if self._dropped:
            logger.warning("%s: %d more lines dropped; at most %d/s are kept", self._name, self._dropped, _LINES_PER_S)
            self._dropped = 0
