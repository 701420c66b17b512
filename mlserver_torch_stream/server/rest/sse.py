"""One response of server-sent events; pings keep it alive while there are no events.

Knows nothing of what an event says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Send

from mlserver_torch_stream.server.rest.chunk_stream import ChunkStream
from mlserver_torch_stream.server.rest.refusal import EncodedHeaders

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
_PING = b": ping\n\n"


class EventStream(ChunkStream):
    """``send`` events inside ``async with``, then ``end``; the status line goes out with the first event or ping.

    ``keep_alive``: seconds of silence before a ping, 0 for none. ``headers``: beside those of every stream of events.
    """

    def __init__(
        self,
        send: Send,
        *,
        keep_alive: float,
        stalled_after: float,
        stalled: Callable[[], None],
        headers: EncodedHeaders,
    ) -> None:
        super().__init__(send, stalled_after=stalled_after, stalled=stalled, headers=[*_HEADERS, *headers])
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
        """One event; ``data`` has no line break, and neither has its ``name``."""
        event = b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
        await (self._after_ping(event) if self._pinging.locked() else self.write(event))

    async def end(self) -> None:
        await self._after_ping(b"", more=False)

    async def _after_ping(self, event: bytes, more: bool = True) -> None:
        async with self._pinging:
            await self.write(event, more)

    async def _ping(self) -> None:
        """Runs until it is cancelled."""
        while True:
            silence = 0.0 if self._sending_since is not None else self._loop.time() - self._sent_at
            if silence < self._keep_alive:
                await asyncio.sleep(self._keep_alive - silence)
            else:
                await self._after_ping(_PING)
