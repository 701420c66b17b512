"""A scripted object server: an S3-like bucket whose answers fail as a test defines, and that records its requests.

Uses none of our code: it simulates faults that a fetch must survive. It also supports enough of GCS for reads.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tests.scripted_http import Handler, serving


@dataclass
class Fault:
    """What happens to a GET instead of an answer: ``kind`` is a status, or reset, cut, stall, change.

    Other kinds: all bytes but no end (``unended``), more bytes than requested (``more``), or another size of the object
    (``resized``).
    """

    kind: str | int
    retry_after: str | None = None
    body: bytes = b"<Error><Code>SlowDown</Code></Error>"


@dataclass
class FaultyServer:
    """``objects`` by path; ``faults`` lists for each path what happens to its next GETs."""

    objects: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    url: str = ""
    delay: float = 0.0
    listing: int = 200  # the status of a listing, which is empty
    denied: set[str] = field(default_factory=set)  # paths that may not even be looked at
    weak: bool = False  # ETags are weak, and meet no If-Match
    quiet: threading.Event = field(default_factory=threading.Event)  # set: stalled answers end

    def gets(self, path: str) -> list[str | None]:
        return [asked for method, at, asked in self.asked if method == "GET" and at == path]


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _handler(server: FaultyServer) -> type[Handler]:
    class Faulty(Handler):
        def do_HEAD(self) -> None:
            self._answer(send=False)

        def do_GET(self) -> None:
            self._answer(send=True)

        def do_PUT(self) -> None:
            self.received()
            self._plain(403, b"<Error><Code>AccessDenied</Code></Error>")

        def _answer(self, send: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if "list-type=2" in self.path:
                return self._plain(server.listing, b"<ListBucketResult></ListBucketResult>")
            wanted = self.headers.get("Range")
            server.asked.append((self.command, path, wanted))
            if path in server.denied:
                return self._plain(403, b"<Error><Code>AccessDenied</Code></Error>")
            body = server.objects.get(path)
            if body is None:
                return self._plain(404, b"<Error><Code>NoSuchKey</Code></Error>")
            if self.headers.get("If-Match") not in (None, "" if server.weak else _etag(body)):
                return self._plain(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            pending = server.faults.get(path) or []
            fault = pending.pop(0) if send and pending else None
            if fault is not None and isinstance(fault.kind, int):
                return self._plain(fault.kind, fault.body, fault.retry_after)
            if fault is not None and fault.kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                self.close_connection = True
                return self.connection.close()
            time.sleep(server.delay)
            self._body(path, body, wanted, fault, send)

        def _body(self, path: str, body: bytes, wanted: str | None, fault: Fault | None, send: bool) -> None:
            start, end = 0, len(body)
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(len(body), int(last or len(body)) + 1)
            kind = None if fault is None else fault.kind
            more = b"more" if kind == "more" else b""
            total = len(body) + (kind == "resized")
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(end - start + len(more)))
            if kind == "unended":
                self.send_header("Transfer-Encoding", "chunked")
            self.send_header("ETag", "W/" + _etag(body) if server.weak else _etag(body))
            self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
            self.send_header("x-goog-generation", "1")
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
            self.end_headers()
            if not send:
                return
            if fault is None or kind in ("more", "resized"):
                self.wfile.write(body[start:end] + more)
                return
            if kind == "unended":
                self.wfile.write(b"%x\r\n%b\r\n" % (end - start, body[start:end]))
                self.close_connection = True
                return
            self.wfile.write(body[start : (start + end) // 2])
            self.wfile.flush()
            if fault.kind == "change":
                server.objects[path] = body[::-1]
            if fault.kind == "stall":
                server.quiet.wait(60)
            self.close_connection = True

        def _plain(self, status: int, body: bytes, retry_after: str | None = None) -> None:
            self.answer(status, body, {} if retry_after is None else {"Retry-After": retry_after})

    return Faulty


@contextmanager
def faulty_server(objects: dict[str, bytes] | None = None) -> Iterator[FaultyServer]:
    server = FaultyServer(objects or {})
    with serving(_handler(server)) as server.url:
        try:
            yield server
        finally:
            server.quiet.set()
