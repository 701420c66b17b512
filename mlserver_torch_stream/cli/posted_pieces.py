"""Posts one body over HTTP and reads the answer in the chunks that the server sent, which httpx joins.

Knows nothing of what is sent. Each post has a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from mlserver_torch_stream.cli.object_row import AnswerTooLarge
from mlserver_torch_stream.cloud.chunk_join import MOST_ANSWER_BYTES
from mlserver_torch_stream.cloud.time_limit import within

_AT_ONCE = 1 << 16
_CONNECT_S = 10.0


class ConnectionBroke(Exception):
    """The server is not there, is silent, or ends its answer early."""


class NotConnected(ConnectionBroke):
    """The server takes no connection."""


@dataclass(frozen=True, slots=True)
class PostedPiece:
    """One chunk of an answer, or a whole answer without chunks. The names of ``headers`` are in lower case."""

    status: int
    headers: Mapping[str, str]
    value: bytes


@dataclass(frozen=True)
class PostForPieces:
    """``timeout``: the longest silence in seconds."""

    url: str
    timeout: float
    headers: Mapping[str, str] = field(default_factory=dict)

    async def pieces(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[PostedPiece, None]:
        """At least one. Raises ConnectionBroke or AnswerTooLarge."""
        try:
            reader, writer = await self._connect()
            try:
                connection = h11.Connection(h11.CLIENT)
                writer.write(b"".join(_encoded(connection, self._request(path, content, headers), content)))
                async for each in _answer(connection, reader, self.timeout):
                    yield each
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.TimeoutError, h11.ProtocolError) as error:
            raise ConnectionBroke(f"{self.url}: {error or type(error).__name__}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises NotConnected."""
        parts = urlsplit(self.url)
        safe = parts.scheme == "https"
        port = parts.port or (443 if safe else 80)
        connecting = asyncio.open_connection(parts.hostname, port, ssl=safe or None)
        try:
            return await within(connecting, _CONNECT_S, lambda opened: opened[1].close())
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise NotConnected(f"{self.url}: {error or type(error).__name__}") from error

    def _request(self, path: str, content: bytes, headers: Mapping[str, str]) -> h11.Request:
        parts = urlsplit(self.url)
        own = {"Host": parts.netloc.rpartition("@")[2], "Content-Length": str(len(content)), "Connection": "close"}
        said = list({**self.headers, **headers, **own}.items())
        return h11.Request(method="POST", target=parts.path + path, headers=said)


def _encoded(connection: h11.Connection, request: h11.Request, content: bytes) -> list[bytes]:
    events = (request, h11.Data(data=content), h11.EndOfMessage())
    return [data for event in events if (data := connection.send(event)) is not None]


async def _answer(
    connection: h11.Connection, reader: asyncio.StreamReader, timeout: float
) -> AsyncGenerator[PostedPiece, None]:
    status, piece, any_piece = 0, bytearray(), False
    headers: Mapping[str, str] = {}
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await within(reader.read(_AT_ONCE), timeout))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            piece += event.data
            if len(piece) > MOST_ANSWER_BYTES:
                raise AnswerTooLarge(f"a piece of the answer is more than {MOST_ANSWER_BYTES} bytes")
            if event.chunk_end:
                yield PostedPiece(status, headers, bytes(piece))
                piece, any_piece = bytearray(), True
        elif isinstance(event, h11.EndOfMessage):
            if piece or not any_piece:
                yield PostedPiece(status, headers, bytes(piece))
            return
