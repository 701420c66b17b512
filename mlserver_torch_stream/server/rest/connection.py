"""The client's end of one request: watched until it leaves, cut off when it stalls.

ASGI hides the connection, so the outermost layer of MLServer's app, which still gets uvicorn's own objects, puts the
connection into the scope.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from mlserver_torch_stream.server.host import transport_of

_KEY = "mlserver_torch_stream.transport"
# Linux and macOS: how many unsent bytes the kernel takes before the server notices that a reader lags. Without it a
# reader that stalls is noticed after about 3 MB.
_UNSENT_BYTES = 16 * 1024
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_UNWATCHED_S = 0.02
_RESET = struct.pack("ii", 1, 0)  # linger for no time: the kernel drops the bytes that it still holds


class NotesTransport:
    """Middleware that notes the connection's transport."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[_KEY] = transport_of(send)
        await self._app(scope, receive, send)


def notice_lag_early(scope: Scope) -> None:
    """Lets back-pressure begin after some kilobytes rather than megabytes."""
    if _NOTSENT_LOWAT is not None:
        _set_option(scope.get(_KEY), socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)


def abort(scope: Scope) -> None:
    """Drops the connection with all that its client has not read. Closing it would wait for the client to read."""
    transport = scope.get(_KEY)
    if transport is not None:
        reset(transport)


def reset(transport: Any) -> None:
    _set_option(transport, socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


async def break_off(scope: Scope, receive: Receive, most_s: float) -> None:
    """Closes the connection within a response, once its client has read what was sent, or after ``most_s`` seconds.

    The end of a body in chunks is missing then, so that the client knows.
    """
    transport = scope.get(_KEY)
    if transport is None:
        return
    transport.close()
    try:
        await asyncio.wait_for(_watch(receive, lambda: None), most_s)
    except asyncio.TimeoutError:
        abort(scope)


def _set_option(transport: Any, level: int, option: int, value: int | bytes) -> None:
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is not None:
        with suppress(OSError):  # no TCP socket
            connection.setsockopt(level, option, value)


@asynccontextmanager
async def watched(receive: Receive, left: Callable[[], None]) -> AsyncIterator[None]:
    """Calls ``left``, once, if the client goes away meanwhile. The request's body must have been read.

    Watching takes a task, which a reply that ends within ``_UNWATCHED_S`` does without.
    """
    watcher: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(_watch(receive, left))

    timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, begin)
    try:
        yield
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait((watcher,))


async def _watch(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()
