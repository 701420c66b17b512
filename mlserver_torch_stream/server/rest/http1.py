"""Extends uvicorn for two kinds of HTTP/1 clients: those that offer another protocol, and those of HTTP/1.0.

Knows nothing of requests and replies. It applies to every request of the REST port, as uvicorn has one protocol class
for all of them.
"""

from __future__ import annotations

from typing import Any

import httptools
from mlserver.rest.server import RESTServer
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


def install(server: RESTServer) -> None:
    """Connections that are made from now on are read by ``Http1``. uvicorn's protocol over h11 needs none of it."""
    config = server._server.config
    if not config.loaded:
        config.load()
    if config.http_protocol_class is HttpToolsProtocol:
        config.http_protocol_class = Http1


class Http1(HttpToolsProtocol):
    """uvicorn's protocol; an offer of another one, such as h2c, is declined, and the request is read as it is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser: Any = _Parser(self)

    def declines(self) -> bool:
        """True if the request at hand offers a protocol that uvicorn does not speak."""
        offered = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        return offered and not self._should_upgrade()

    def on_headers_complete(self) -> None:
        if self.declines():
            return  # the parser reads this head again, without the offer
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClosed

    def on_message_complete(self) -> None:
        if not self.declines():
            super().on_message_complete()

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
