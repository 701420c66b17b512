"""A proxy like the one that Seldon Core 2's agent runs beside each server: OpenAI chat requests in, V2 requests out.

Knows HTTP and the model's name with its version; the translator converts requests and replies.
"""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import ClassVar

from tests.protocol.seldon_translator import Untranslatable, openai_body, openai_events, v2_path, v2_request
from tests.scripted_http import serving
from tests.server.harness import HOST, Server
from tests.server.v2 import TIMEOUT_S

_NOT_LOADED = (400, 404)  # the agent loads the model anew and sends the request once more
_DROPPED = ("connection", "content-length", "date", "keep-alive", "server", "transfer-encoding")


@contextmanager
def seldon_proxy(server: Server, versions: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields the base URL. ``versions`` maps the names that clients use to the names of models on the server."""

    class Proxy(_Proxy):
        port = server.http_port
        internal_names = versions or {}

    with serving(Proxy) as url:
        yield url


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: ClassVar[int]
    internal_names: ClassVar[Mapping[str, str]]

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        try:
            path = self._internal(self.path)
            body = v2_request(path, raw)
            path = v2_path(path)
        except Untranslatable as error:
            self._send(400, {}, f"Failed to translate request to OIP format: {error}".encode())
            return
        with self._forwarded(path, json.dumps(body).encode()) as reply:
            self._answer(reply)

    @contextmanager
    def _forwarded(self, path: str, raw: bytes) -> Iterator[http.client.HTTPResponse]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (*_DROPPED, "host")}
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, raw, headers)
            reply = connection.getresponse()
            if reply.status in _NOT_LOADED:
                reply.read()
                connection.request("POST", path, raw, headers)
                reply = connection.getresponse()
            yield reply
        finally:
            connection.close()

    def _answer(self, reply: http.client.HTTPResponse) -> None:
        headers = {name: value for name, value in reply.getheaders() if name.lower() not in _DROPPED}
        try:
            if reply.headers.get_content_type() == "text/event-stream":
                self._stream(reply, headers)
                return
            raw = reply.read()
            packed = reply.headers.get("content-encoding") == "gzip"
            body = openai_body(gzip.decompress(raw) if packed else raw)
            self._send(reply.status, headers, gzip.compress(body) if packed else body)
        except Untranslatable as error:
            self._send(500, {}, f"Failed to translate response from OIP format: {error}".encode())

    def _stream(self, reply: http.client.HTTPResponse, headers: Mapping[str, str]) -> None:
        """The first event decides the status; if a later event cannot be translated, the connection breaks."""
        events = openai_events(iter(lambda: reply.read1(65536), b""))
        first = next(events, None)
        if first is None:
            raise Untranslatable("the stream is empty")
        self._head(reply.status, {**headers, "Transfer-Encoding": "chunked"})
        try:
            for event in chain((first,), events):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.write(b"0\r\n\r\n")
        except (Untranslatable, ConnectionError):  # a ConnectionError: the client has left
            self.close_connection = True

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _internal(self, path: str) -> str:
        before, models, rest = path.partition("/v2/models/")
        name, slash, behind = rest.partition("/")
        return before + models + self.internal_names.get(name, name) + slash + behind

    def log_message(self, format: str, *args: object) -> None: ...
