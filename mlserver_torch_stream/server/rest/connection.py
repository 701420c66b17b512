"""Handles HTTP/1 on the REST port: heads and bodies of requests, whole responses, and clients that disconnect.

ASGI hides the connection. So the outermost layer of MLServer's app, which still gets uvicorn's own objects, puts the
connection into the scope.

Raw bytes of tensors may follow the JSON object; the header ``Inference-Header-Content-Length`` says where they begin.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.gunzip import PIECE_BYTES, Damaged, Gunzip
from mlserver_torch_stream.protocol.values import named, parse_bounded
from mlserver_torch_stream.server.host import HttpProtocol, ReceivedRequest, ServerHost, transport_of
from mlserver_torch_stream.server.options import ServerOptions

_KEY = "mlserver_torch_stream.transport"
# On Linux and macOS: the unsent bytes that the kernel accepts before the server notices that a reader lags. By default
# a stalled reader would be noticed after about 3 MB.
_UNSENT_BYTES = 16 * 1024
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_UNWATCHED_S = 0.02
_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: the kernel drops unsent bytes


class NotesTransport:
    """Middleware that puts the connection's transport into the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[_KEY] = transport_of(send)
        await self.app(scope, receive, send)


def notice_lag_early(scope: Scope) -> None:
    """Lets back-pressure begin after kilobytes instead of megabytes of unsent bytes."""
    if _NOTSENT_LOWAT is not None:
        _set_option(scope.get(_KEY), socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)


def abort(scope: Scope) -> None:
    """Drops the connection and all unsent bytes. A normal close would wait until the client has read them."""
    transport = scope.get(_KEY)
    if transport is not None:
        reset(transport)


def reset(transport: Any) -> None:
    """Closes a connection with a TCP reset, so that the client sees a broken stream and not a normal end."""
    _set_option(transport, socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


async def break_off(scope: Scope, receive: Receive, most_s: float) -> None:
    """Closes the connection in the middle of a response, once the client has read all bytes or after ``most_s``
    seconds.

    The missing end of the chunked body tells the client that the response is incomplete.
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
        with suppress(OSError):  # not a TCP socket
            connection.setsockopt(level, option, value)


class WatchedConnection:
    """Calls ``left`` once if the client disconnects during the ``async with`` block. The request's body must have been
    read.

    A connection that ``Http1`` reads reports its end. Any other connection is watched by a task, which starts only
    after ``_UNWATCHED_S`` seconds, so that short replies do not need it.
    """

    def __init__(self, scope: Scope, receive: Receive, left: Callable[[], None]) -> None:
        transport = scope.get(_KEY)
        protocol = None if transport is None else transport.get_protocol()
        self._protocol = protocol if isinstance(protocol, Http1) else None
        self._receive, self._left = receive, left
        self._begins: asyncio.Handle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._protocol is None:
            self._begins = loop.call_later(_UNWATCHED_S, self._begin)
        elif self._protocol.lost:
            self._begins = loop.call_soon(self._left)
        else:
            self._protocol.watchers.add(self._left)
            self._protocol.read_on()

    async def __aexit__(self, *error: object) -> None:
        if self._protocol is not None:
            self._protocol.watchers.discard(self._left)
        if self._begins is not None:
            self._begins.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))

    def _begin(self) -> None:
        self._watcher = asyncio.create_task(_watch(self._receive, self._left))


@contextmanager
def letting_pause(scope: Scope) -> Iterator[None]:
    """During the ``with`` block the client may pause within its body, because it waits for a part of the response."""
    transport = scope.get(_KEY)
    protocol = None if transport is None else transport.get_protocol()
    if not isinstance(protocol, Http1):
        yield
        return
    protocol.begin_answer()
    try:
        yield
    finally:
        protocol.end_answer()


async def _watch(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()


# The bound of a head, and of chunk extensions and trailers in a body, which httptools does not bound.
_MAX_BYTES_BESIDE_BODY = 64 * 1024
_GRACE_S = 1.0  # first, endpoints with the same limit, such as uploads and streams, end their requests themselves


class DirectDoor(Protocol):
    """Answers requests before the app gets them."""

    def wants(self, app: ASGIApp, scope: Scope) -> bool:
        """Whether ``answer`` may answer a request whose head has arrived, in place of ``app``."""

    def answer(self, request: ReceivedRequest) -> None:
        """Answers the request, or passes it on to the app, now or later."""


def install(host: ServerHost, options: ServerOptions, door: DirectDoor) -> None:
    """Makes uvicorn read new connections to the REST port with ``Http1``, unless uvicorn uses h11."""
    host.put_outside(NotesTransport)
    host.read_http_by(partial(Http1, options=options, door=door))


class Http1(HttpProtocol):
    """uvicorn's protocol with time limits. An upgrade to another protocol, such as h2c, is declined, and the request is
    answered over HTTP/1.

    A client must send the head of a request within ``piece_timeout`` seconds, and may then not pause longer than this
    within the body, unless the server owes it a part of the response. It must read some of a response at least every
    ``stalled_reader_timeout`` seconds, unless that is 0. Otherwise its connection is closed. When a client disconnects,
    all its pipelined requests end.
    """

    def __init__(self, *args: Any, options: ServerOptions, door: DirectDoor, **more: Any) -> None:
        super().__init__(*args, **more)
        self._door = door
        self.parser: Any = _Parser(self)
        self._beside_body = 0
        self._silent_after = options.piece_timeout
        self._stalled_after = options.stalled_reader_timeout
        # When the last bytes of an incomplete request arrived; None if no request is incomplete.
        self._waiting_since: float | None = None
        self._owed = 0  # parts of the response for which the client waits before it sends more of its body
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self.lost = False  # True: the client has disconnected
        self.watchers: set[Callable[[], None]] = set()  # called when the client disconnects

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.lost = True
        for left in tuple(self.watchers):
            left()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None and not self.transport.is_closing():
            self._reader_timer.cancel()
            self._reader_timer = None

    def kept_alive(self) -> None:
        """Sets a time limit for a client that does not read, because the close waits until the client has read
        everything.
        """
        self._watch_reader()

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > _MAX_BYTES_BESIDE_BODY and not self.transport.is_closing():
            limit = f"at most {_MAX_BYTES_BESIDE_BODY} bytes are allowed"
            self.logger.warning(f"The head of a request, or a chunk extension or trailer, is too long: {limit}.")
            self.refuse_head(f"The head of the request, or a chunk extension or trailer, is too long: {limit}.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_more()

    def on_body(self, body: bytes) -> None:
        self._beside_body = 0
        self._waiting_since = self.loop.time()
        super().on_body(body)

    def keeps(self, scope: Scope) -> bool:
        return self._door.wants(self.app, scope)

    def received(self, request: ReceivedRequest) -> None:
        self._door.answer(request)

    def takes_head(self) -> bool:
        """Returns whether the head of a request is accepted. Raises ValueError if the head names two hosts."""
        self._beside_body = 0
        self._waiting_since = self.loop.time()
        if self.declines():
            return False  # the parser reads this head again without the upgrade
        if sum(name == b"host" for name, _ in self.headers) > 1:  # proxies differ in which one they use
            self.refusal = "host: given twice"
            raise ValueError(self.refusal)
        return True

    def takes_end(self) -> bool:
        self._beside_body = 0
        if self.declines():
            return False
        self._waiting_since = None
        return True

    def begin_answer(self) -> None:
        """Called when the server begins to make a part of the response for which the client waits within its body."""
        self._owed += 1

    def end_answer(self) -> None:
        """Called when such a part has been sent, or will not be sent."""
        self._owed -= 1
        if self._waiting_since is not None:
            self._waiting_since = self.loop.time()

    def _wait_for_more(self) -> None:
        self._waiting_since = self.loop.time()
        if self._timer is None and self._silent_after:
            self._timer = self.loop.call_later(self._silent_after + _GRACE_S, self._check_silence)

    def _check_silence(self) -> None:
        """Closes the connection if the client has sent nothing for too long, unless reading is paused or the client
        waits for a part of the response.

        Many requests share one timer.
        """
        self._timer = None
        if self._waiting_since is None:
            return
        now = self.loop.time()
        since = self._waiting_since if self.client_may_send and not self._owed else now
        left = since + self._silent_after + _GRACE_S - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_silence)
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        if self._reader_timer is None and self._stalled_after:
            self._check_reader(math.inf)

    def _check_reader(self, before: float) -> None:
        """Closes the connection if the client has read nothing since the last check.

        ``before`` is the number of unsent bytes then; it only shrinks, since writing is paused.
        """
        self._reader_timer = None
        left = self.transport.get_write_buffer_size()
        if 0 < left < before:
            self._reader_timer = self.loop.call_later(self._stalled_after + _GRACE_S, self._check_reader, left)
        elif left:
            self.logger.warning(f"A client has read nothing for {self._stalled_after:g} s: its connection is closed")
            reset(self.transport)

    def plain_head(self) -> bytes:
        """Returns the head of the current request without its upgrade."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class _Parser:
    """httptools' parser, extended to the body of a request whose upgrade is declined.

    httptools takes all bytes after such a head for the other protocol, and reports a request without a body.
    """

    def __init__(self, protocol: Http1) -> None:
        self._protocol = protocol
        self._use(protocol.parser)

    def _use(self, parser: httptools.HttpRequestParser) -> None:
        """Makes this parser's methods our own; they are called several times for each request."""
        self._parser = parser
        self.get_http_version, self.get_method = parser.get_http_version, parser.get_method
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.declines():
                    raise
                head, data = self._protocol.plain_head(), data[upgrade.args[0] :]
            self._use(httptools.HttpRequestParser(self._protocol))
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self._parser.feed_data(head)


JSON_LENGTH = "inference-header-content-length"
_LENGTH = re.compile(r"0*([0-9]{1,20})[ \t]*")  # white space after the value is allowed
_CODINGS = ("identity", "gzip", "x-gzip")


class BodyTooLarge(RequestError):
    """The body is larger than the settings allow, before or after decompression."""

    status = 413


class UnknownCoding(RequestError):
    """The body has a content coding other than gzip."""

    status = 415


class ClientLeft(Exception):
    """The client disconnected before its request was complete, so there is nothing to answer."""


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Reads and decompresses a request's body of at most ``most_bytes``. Raises RequestError or ClientLeft."""
    body, more = _decoder(scope["headers"], most_bytes), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        body.feed(message.get("body", b""))
    return body.whole()


def split_binary(headers: Headers, body: bytes) -> tuple[bytes, bytes]:
    """Splits a body into its JSON and the raw bytes of tensors after it. Raises InvalidInput."""
    declared = headers.get(JSON_LENGTH)
    if declared is None:
        return body, b""
    length = as_length(declared)
    if length is None or not 0 < length <= len(body):
        raise InvalidInput(JSON_LENGTH, f"must be from 1 to the body's {len(body)} bytes, got {declared[:20]!r}")
    return body[:length], body[length:]


def as_length(declared: str) -> int | None:
    """Parses a number of bytes; returns None if the text is not one, or has more than 20 significant digits."""
    match = _LENGTH.fullmatch(declared)
    return None if match is None else int(match[1])


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises InvalidInput if the bytes are anything else."""
    parsed = parse_json(raw)
    if not isinstance(parsed, dict):
        raise InvalidInput("body", f"must be a JSON object, got a {type(parsed).__name__}")
    return parsed


def parse_json(raw: bytes) -> Any:
    """Parses JSON of any kind. Raises InvalidInput."""
    return named("body", parse_bounded, raw)


def _decoder(headers: EncodedHeaders, most_bytes: int) -> _Plain:
    """Returns the reader of a body with these headers. Raises an error if ``Content-Length`` is too large, before a
    client that waits for ``100 Continue`` sends the body.
    """
    codings = []
    for name, value in headers:
        if name == b"content-encoding":
            codings.append(value.decode("latin-1"))
        elif name == b"content-length":
            declared = as_length(value.decode("latin-1"))
            if declared is not None and declared > most_bytes:
                raise _too_large(most_bytes)
    coding = ", ".join(codings).strip().lower() or "identity"
    if coding not in _CODINGS:
        raise UnknownCoding(f"content-encoding: {coding[:100]!r} is not supported; only gzip is")
    return _Plain(most_bytes) if coding == "identity" else _Gzip(most_bytes)


def _too_large(most_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"body: larger than {most_bytes} bytes after decompression")


class _Plain:
    """Collects a body, and raises BodyTooLarge above its bound."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._collected: bytes | bytearray = b""

    def feed(self, chunk: bytes) -> None:
        if not self._collected:
            self._collected = chunk  # most bodies arrive whole, and are not copied
        else:
            self._collected = bytearray(self._collected) if isinstance(self._collected, bytes) else self._collected
            self._collected += chunk
        if len(self._collected) > self._most:
            raise _too_large(self._most)

    def whole(self) -> bytes:
        return bytes(self._collected)  # bytes are not copied


class _Gzip(_Plain):
    """Decompresses a gzip body, and never holds more than the bound plus one byte.

    The compressed body has the same bound, because many empty members decompress to nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self._packed = 0
        self._gunzip = Gunzip()

    def feed(self, chunk: bytes) -> None:
        self._packed += len(chunk)
        if self._packed > self._most:
            raise _too_large(self._most)
        try:
            for piece in self._gunzip.feed(chunk, min(PIECE_BYTES, self._most + 1 - len(self._collected))):
                super().feed(piece)
        except Damaged as error:
            raise InvalidInput("content-encoding", f"the body {error}") from None

    def whole(self) -> bytes:
        try:
            self._gunzip.end()
        except Damaged as error:
            raise InvalidInput("content-encoding", f"the body {error}") from None
        return super().whole()


EncodedHeaders = list[tuple[bytes, bytes]]
_NO_CONTENT = 204  # by RFC 9110 it has no content-length


async def send_refusal(send: Send, status: int, body: bytes, retry_after: int | None, headers: EncodedHeaders) -> None:
    """Sends an error as a whole JSON response. ``retry_after`` is in seconds."""
    again = [(b"retry-after", str(retry_after).encode())] if retry_after is not None else []
    await send_json(send, status, body, [*headers, *again])


async def send_json(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    """Sends a whole response of JSON."""
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *headers])


async def send_whole(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    """Sends a whole response, with ``content-length``."""
    always = [] if status == _NO_CONTENT else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
