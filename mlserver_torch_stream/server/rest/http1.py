"""Extends uvicorn for HTTP/1 clients that offer another protocol, speak HTTP/1.0, or never end or read anything.

It applies to every request of the REST port, as uvicorn has one protocol class for all of them.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import httptools

from mlserver_torch_stream.server.host import HttpProtocol, ServerHost
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.connection import reset

# Of a head, and between the bytes of a body: chunk extensions and trailers. httptools takes any number.
_MAX_BYTES_BESIDE_BODY = 64 * 1024
_GRACE_S = 1.0  # for an endpoint that has the same limit and ends its request itself, as an upload and a stream do


def install(host: ServerHost, options: ServerOptions) -> None:
    """Connections that are made from now on are read by ``Http1``. Of this, uvicorn's protocol over h11 needs the time
    limits only."""
    host.read_http_by(partial(Http1, options=options))


class Http1(HttpProtocol):
    """uvicorn's protocol; an offer of another one, such as h2c, is declined, and the request is read as it is.

    A client must send the head of a request within ``piece_timeout`` seconds, and the next bytes of its body within as
    many; it must read some of its answers in each ``stalled_reader_timeout`` (0: no limits). Otherwise its connection
    is closed. When it disconnects, all requests that it has sent ahead end.
    """

    def __init__(self, *args: Any, options: ServerOptions, **more: Any) -> None:
        super().__init__(*args, **more)
        self.parser: Any = _Parser(self)
        self._beside_body = 0
        self._silent_after = options.piece_timeout
        self._stalled_after = options.stalled_reader_timeout
        self._waiting_since: float | None = None  # for the rest of a request; None: the last one is complete
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None and not self.transport.is_closing():
            self._reader_timer.cancel()
            self._reader_timer = None

    def kept_alive(self) -> None:
        """Closing waits until the client has read everything."""
        self._watch_reader()

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > _MAX_BYTES_BESIDE_BODY and not self.transport.is_closing():
            self.logger.warning("The head of a request is too long.")
            self.refuse_head("The head of the request is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_more()

    def on_body(self, body: bytes) -> None:
        self._beside_body = 0
        self._waiting_since = self.loop.time()
        super().on_body(body)

    def takes_head(self) -> bool:
        self._beside_body = 0
        self._waiting_since = self.loop.time()
        if self.declines():
            return False  # the parser reads this head again, without the offer
        if sum(name == b"host" for name, _ in self.headers) > 1:  # proxies differ in which of them they take
            self.refusal = "host: given twice"
            raise ValueError(self.refusal)
        return True

    def takes_end(self) -> bool:
        self._beside_body = 0
        if self.declines():
            return False
        self._waiting_since = None
        return True

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
        since = self._waiting_since if self.client_may_send else now
        left = since + self._silent_after + _GRACE_S - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_silence)
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        if self._reader_timer is None and self._stalled_after:
            self._check_reader(math.inf)

    def _check_reader(self, before: float) -> None:
        """``before``: bytes that were left to send at the last check. None are added while writing is paused."""
        self._reader_timer = None
        left = self.transport.get_write_buffer_size()
        if 0 < left < before:
            self._reader_timer = self.loop.call_later(self._stalled_after + _GRACE_S, self._check_reader, left)
        elif left:
            self.logger.warning(f"A client has read nothing for {self._stalled_after:g} s: its connection is closed")
            reset(self.transport)

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
