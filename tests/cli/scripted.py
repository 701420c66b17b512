"""A scripted HTTP server: it answers each request with given bytes, in given chunks, and records the requests.

It needs none of our protocols, and simulates faults that a client must survive.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.scripted_http import Handler, serving


@dataclass
class ScriptedServer:
    """``scripts`` has a list of chunks for each stream request, in order; ``truncate`` breaks off the last body.

    With ``hold``, a body that is sent in chunks does not end before the server does.
    """

    scripts: list[Sequence[bytes]]
    models: Sequence[str]
    status: int
    truncate: bool
    more: Mapping[str, str]  # headers of whole bodies
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


def _handler(server: ScriptedServer) -> type[Handler]:
    class Scripted(Handler):
        def do_GET(self) -> None:
            server.headers.append(dict(self.headers))
            self.answer(200, json.dumps({"data": [{"id": name} for name in server.models]}).encode())

        def do_POST(self) -> None:
            server.headers.append(dict(self.headers))
            body = json.loads(self.received())
            if self.path == "/v2/repository/index":
                index = [{"name": name, "state": "READY"} for name in server.models]
                return self.answer(200, json.dumps(index).encode())
            server.asked.append({"path": self.path, **body})
            chunks = server.scripts.pop(0)
            if server.status != 200:
                return self.answer(server.status, b"".join(chunks), server.more)
            self._chunked(chunks)

        def _chunked(self, chunks: Sequence[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                self.wfile.flush()
            server.ended.wait(60)
            if server.truncate:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

    return Scripted


@contextmanager
def scripted_server(
    *scripts: Sequence[bytes],
    models: Sequence[str] = ("m",),
    status: int = 200,
    truncate: bool = False,
    hold: bool = False,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ScriptedServer]:
    """``headers`` are sent with bodies that are not chunked."""
    server = ScriptedServer(list(scripts), models, status, truncate, headers)
    if not hold:
        server.ended.set()
    with serving(_handler(server)) as server.url:
        try:
            yield server
        finally:
            server.ended.set()


def event(text: str, *, finish: str | None = None, error: str | None = None) -> bytes:
    """Returns one V2 response as a server-sent event."""
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}]
    parameters: dict[str, Any] = {"index": 0}
    if finish:
        parameters["triton_final_response"] = True
        outputs.append({"name": "finish_reason", "datatype": "BYTES", "shape": [1], "data": [finish]})
    if error:
        parameters["error"] = error
    body = {"model_name": "m", "outputs": outputs, "parameters": parameters}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
