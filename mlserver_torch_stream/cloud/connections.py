"""The HTTP connections of runs and watchers: opens aiohttp's sockets, and waits until they are closed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp

_CLOSING_S = 0.05  # aiohttp does not wait until its transports have closed their sockets


class _Socket(socket.socket):
    """A socket that does not close its descriptor when it is garbage-collected.

    If a connection is cancelled before it is established, uvloop closes its descriptor but leaves the socket object
    open. When the object is collected, it would close whatever file has this number by then.
    """

    def __del__(self) -> None:
        self.detach()


def make_connector(limit: int = 100) -> aiohttp.TCPConnector:
    """Returns the connector of a session that has at most ``limit`` connections."""
    return aiohttp.TCPConnector(limit=limit, socket_factory=_socket)


async def close_session(session: aiohttp.ClientSession) -> None:
    """Closes the session, and waits until its sockets are closed too."""
    await session.close()
    await asyncio.sleep(_CLOSING_S)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Returns an unconnected socket for the ``address``, a tuple of getaddrinfo()."""
    family, kind, protocol, *_ = address
    return _Socket(family, kind, protocol)
