"""A proxy that serves a server below a prefix, as an ingress does: the server sees the path without the prefix."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from tests.scripted_http import Handler, serving

PREFIX = "/behind/a/prefix"
_DROPPED = ("connection", "date", "keep-alive", "server", "transfer-encoding")


class _Proxy(Handler):
    port: ClassVar[int]
    protocol_version = "HTTP/1.0"  # an answer ends with its connection, so that pieces pass as they come

    def do_GET(self) -> None:
        if not self.path.startswith(f"{PREFIX}/"):
            self.answer(404)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            upstream.request(self.command, self.path.removeprefix(PREFIX), self.received(), dict(self.headers))
            reply = upstream.getresponse()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in _DROPPED:
                    self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the browser has left
                while piece := reply.read1():
                    self.wfile.write(piece)
        finally:
            upstream.close()

    do_POST = do_GET


@contextmanager
def below_a_prefix(port: int) -> Iterator[str]:
    """Yields the address of the server's root, with the slash at its end."""

    class Proxy(_Proxy):
        pass

    Proxy.port = port
    with serving(Proxy) as url:
        yield f"{url}{PREFIX}/"
