"""Sends a response in chunks or server-sent events. The response starts with its first chunk, and ends if the client
does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from starlette.types import Send

from mlserver_torch_stream.protocol.spelling import Spelling
from mlserver_torch_stream.server.options import LAST_LOOK_S
from mlserver_torch_stream.server.rest.connection import EncodedHeaders

Self = TypeVar("Self", bound="ChunkStream")


class ChunkStream:
    """A response in chunks. Call ``write`` inside ``async with``; the status line is sent with the first chunk.

    If a write has waited ``stalled_after`` seconds for the reader, ``stalled`` is called, which must make the write
    return; 0 means no limit.
    """

    def __init__(
        self,
        send: Send,
        *,
        stalled_after: float,
        stalled: Callable[[], None],
        status: int = 200,
        headers: EncodedHeaders,
    ) -> None:
        self.started = False
        self._status = status
        self._headers = headers
        self._send = send
        self._stalled_after = stalled_after
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._overdue: float | None = None  # the start of a write that was already overdue at the last check
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self: Self) -> Self:
        if self._stalled_after:
            self._timer = self._loop.call_later(self._stalled_after, self._check_reader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, chunk: bytes, more: bool = True) -> None:
        """Sends one chunk. If ``more`` is false, it is the last. Calls must not overlap."""
        self._sending_since = self._loop.time()
        try:
            if not self.started:
                self.started = True
                start = {"type": "http.response.start", "status": self._status, "headers": self._headers}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        finally:
            self._sending_since = None
        self._sent_at = self._loop.time()

    def _check_reader(self) -> None:
        blocked = 0.0 if self._sending_since is None else self._loop.time() - self._sending_since
        if blocked < self._stalled_after:
            self._timer = self._loop.call_later(self._stalled_after - blocked, self._check_reader)
        elif self._overdue != self._sending_since:
            self._overdue = self._sending_since
            self._timer = self._loop.call_later(LAST_LOOK_S, self._check_reader)
        else:
            self._stalled()


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
]


class EventStream(ChunkStream):
    """A stream of server-sent events. Call ``send`` inside ``async with``, then ``end``.

    The status line is sent with the first event or ping. After ``keep_alive`` seconds without an event, a ``ping`` is
    sent; 0 means no pings. ``headers`` are added to the headers of every stream.
    """

    def __init__(
        self,
        send: Send,
        *,
        keep_alive: float,
        stalled_after: float,
        stalled: Callable[[], None],
        headers: EncodedHeaders,
        ping: bytes = Spelling.keep_alive,
    ) -> None:
        super().__init__(send, stalled_after=stalled_after, stalled=stalled, headers=[*_HEADERS, *headers])
        self._ping_block = ping
        self._keep_alive = keep_alive
        self._pings: asyncio.Task[None] | None = None
        self._pinging = asyncio.Lock()  # held while a ping waits for the reader

    async def __aenter__(self) -> EventStream:
        await super().__aenter__()
        if self._keep_alive:
            self._pings = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.wait((self._pings,))

    async def send(self, data: bytes, name: str | None = None) -> None:
        """Sends one event. Neither ``data`` nor ``name`` may contain a line break."""
        event = b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
        await (self._after_ping(event) if self._pinging.locked() else self.write(event))

    async def end(self) -> None:
        await self._after_ping(b"", more=False)

    async def _after_ping(self, event: bytes, more: bool = True) -> None:
        async with self._pinging:
            await self.write(event, more)

    async def _ping(self) -> None:
        """Sends pings until it is cancelled."""
        while True:
            silence = 0.0 if self._sending_since is not None else self._loop.time() - self._sent_at
            if silence < self._keep_alive:
                await asyncio.sleep(self._keep_alive - silence)
            else:
                await self._after_ping(self._ping_block)
