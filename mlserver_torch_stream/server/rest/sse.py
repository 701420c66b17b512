"""One response of server-sent events: begun as late as possible, kept alive in silence, given up when nobody reads.

Knows nothing of what an event says, nor of what is to be done when the reader has stalled: it is told whom to call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
_PING = b": ping\n\n"


class EventStream:
    """``send`` events inside ``async with``, then ``end``; the status line goes out with the first event or ping.

    ``keep_alive``: seconds of silence before a ping, 0 for none. ``stalled_after``: seconds that a send may wait for
    the reader before ``stalled`` is called, which has to make it return; 0 for ever.
    """

    def __init__(self, send: Send, *, keep_alive: float, stalled_after: float, stalled: Callable[[], None]) -> None:
        self.started = False
        self.headers = list(_HEADERS)
        self._send = send
        self._keep_alive = keep_alive
        self._stalled_after = stalled_after
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()  # between events and pings
        self._sending_since: float | None = None
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._pings: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventStream:
        if self._stalled_after:
            self._timer = self._loop.call_later(self._stalled_after, self._check_reader)
        if self._keep_alive:
            self._pings = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.wait((self._pings,))

    async def send(self, data: bytes) -> None:
        """One event; ``data`` has no line break."""
        await self._write(b"data: %b\n\n" % data)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, chunk: bytes, more: bool = True) -> None:
        async with self._turn:
            self._sending_since = self._loop.time()
            try:
                if not self.started:
                    self.started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self.headers})
                await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
            finally:
                self._sending_since = None
            self._sent_at = self._loop.time()

    async def _ping(self) -> None:
        """Runs until it is cancelled."""
        while True:
            silence = 0.0 if self._turn.locked() else self._loop.time() - self._sent_at
            if silence < self._keep_alive:
                await asyncio.sleep(self._keep_alive - silence)
            else:
                await self._write(_PING)

    def _check_reader(self) -> None:
        blocked = 0.0 if self._sending_since is None else self._loop.time() - self._sending_since
        if blocked >= self._stalled_after:
            self._stalled()
        else:
            self._timer = self._loop.call_later(self._stalled_after - blocked, self._check_reader)
