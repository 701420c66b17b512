"""Checks that a stream ends with its final delta.

Knows nothing of transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlserver_torch_stream.client.client_errors import StreamBroken
from mlserver_torch_stream.client.deltas import Delta


class StreamEnding:
    """``started``: the first event has arrived."""

    def __init__(self) -> None:
        self.started = False
        self._final = False

    def note(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """Yields the deltas of one event, and remembers whether one of them is the final one."""
        self.started = True
        for delta in deltas:
            self._final = self._final or delta.final
            yield delta

    def check(self) -> None:
        if not self._final:
            raise self.broken("the stream ended before its final event")

    def broken(self, message: str) -> StreamBroken:
        return StreamBroken(
            message if self.started else f"{message} (before its first event: the server's log says why)"
        )
