"""A scripted blob container: as Azure, it lists ETags without quotes, answers with them and asks for them in If-Match.

Knows nothing of our code. Reads only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_DATE = "Wed, 21 Oct 2026 07:28:00 GMT"
_ETAG = "0x8DC0FFEE"


def _listing(objects: Mapping[str, bytes]) -> bytes:
    blobs = "".join(
        f"<Blob><Name>{name}</Name><Properties><Last-Modified>{_DATE}</Last-Modified><Etag>{_ETAG}</Etag>"
        f"<Content-Length>{len(data)}</Content-Length><Content-Type>text/plain</Content-Type></Properties></Blob>"
        for name, data in objects.items()
    )
    return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()


@contextmanager
def azure_server(objects: Mapping[str, bytes]) -> Iterator[str]:
    """The URL of a server whose every container holds ``objects``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "comp=list" in self.path:
                return self._send(200, _listing(objects))
            if self.headers.get("If-Match") not in (None, f'"{_ETAG}"'):
                return self._send(412, b"")
            self._send(200, objects[urlsplit(self.path).path.rpartition("/")[2]])

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{_ETAG}"')
            self.send_header("Last-Modified", _DATE)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
