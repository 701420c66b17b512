"""Extends uvicorn for HTTP/1 clients that offer another protocol, that speak HTTP/1.0, or that never end a request.

Knows nothing of requests and replies. It applies to every request of the REST port, as uvicorn has one protocol class
for all of them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httptools
from mlserver.rest.server import RESTServer
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Of a head, and between the bytes of a body: chunk extensions and trailers. httptools takes any number.
_MOST_BYTES_BESIDE_BODY = 64 * 1024
_GRACE_S = 1.0  # for an endpoint that answers a silent client itself, as an upload does


def install(server: RESTServer, silent_after: float) -> None:
    """Connections that are made from now on are read by ``Http1``. uvicorn's protocol over h11 needs none of it, but
    the time limit ``silent_after``."""
    config = server._server.config
    if not config.loaded:
        config.load()
    if config.http_protocol_class is HttpToolsProtocol:
        config.http_protocol_class = partial(Http1, silent_after=silent_after)


class Http1(HttpToolsProtocol):
    """uvicorn's protocol; an offer of another one, such as h2c, is declined, and the request is read as it is.

    A client must send the head of a request within ``silent_after`` seconds, and the next bytes of its body within as
    many (0: no limit); otherwise its connection is closed. When it disconnects, all requests that it has sent ahead
    end.
    """

    def __init__(self, *args: Any, silent_after: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser: Any = _Parser(self)
        self._beside_body = 0
        self._earlier: list[RequestResponseCycle] = []  # requests that were sent ahead of the last one
        self._silent_after = silent_after
        self._waiting_since: float | None = None  # for the rest of a request; None: the last one is complete
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the last request only."""
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > _MOST_BYTES_BESIDE_BODY and not self.transport.is_closing():
            self.logger.warning("The head of a request is too long.")
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_more()

    def on_body(self, body: bytes) -> None:
        self._beside_body = 0
        self._waiting_since = self.loop.time()
        super().on_body(body)

    def declines(self) -> bool:
        """True if the request at hand offers a protocol that uvicorn does not speak."""
        offered = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        return offered and not self._should_upgrade()

    def on_headers_complete(self) -> None:
        self._beside_body = 0
        self._waiting_since = self.loop.time()
        if self.declines():
            return  # the parser reads this head again, without the offer
        self._earlier = [cycle for cycle in (*self._earlier, self.cycle) if cycle and not cycle.response_complete]
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClosed

    def on_message_complete(self) -> None:
        self._beside_body = 0
        if not self.declines():
            self._waiting_since = None
            super().on_message_complete()

    def _wait_for_more(self) -> None:
        self._waiting_since = self.loop.time()
        if self._timer is None and self._silent_after:
            self._timer = self.loop.call_later(self._silent_after + _GRACE_S, self._check_silence)

    def _check_silence(self) -> None:
        """Many requests share one timer. While reading is paused, the client cannot send."""
        self._timer = None
        if self._waiting_since is None:
            return
        now = self.loop.time()
        since = now if self.flow.read_paused else self._waiting_since
        left = since + self._silent_after + _GRACE_S - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_silence)
        else:
            self.transport.close()

    def plain_head(self) -> bytes:
        """The head of the request at hand without its offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class _Parser:
    """httptools' parser, which goes on where httptools ends: at a body that follows a declined offer.

    httptools takes all that follows such a head for the other protocol, and tells of a request without a body.
    """

    def __init__(self, protocol: Http1) -> None:
        self._protocol = protocol
        self._parser: httptools.HttpRequestParser = protocol.parser

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.declines():
                    raise
                head, data = self._protocol.plain_head(), data[upgrade.args[0] :]
            self._parser = httptools.HttpRequestParser(self._protocol)
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
            self._parser.feed_data(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class _UntilClosed(RequestResponseCycle):
    """The answer to an HTTP/1.0 client, which knows no chunks: its body lasts until the connection is closed."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))  # uvicorn refuses more than was declared
        await super().send(message)
