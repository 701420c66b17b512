"""A scripted HTTP server: it answers each request with given bytes, in given chunks, and keeps what it was asked.

Knows no protocol of ours: it is the faulty world that a client must survive.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer:
    """``scripts``: one list of chunks per stream request, in order; ``truncate`` breaks the last body off."""

    def __init__(self, scripts: Sequence[Sequence[bytes]], models: Sequence[str], status: int, truncate: bool) -> None:
        self.asked: list[dict[str, Any]] = []
        self._scripts = list(scripts)
        self._models = models
        self._status = status
        self._truncate = truncate
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v2/repository/index":
                    index = [{"name": name, "state": "READY"} for name in scripted._models]
                    return self._whole(200, json.dumps(index).encode())
                scripted.asked.append({"path": self.path, **body})
                chunks = scripted._scripts.pop(0)
                if scripted._status != 200:
                    return self._whole(scripted._status, b"".join(chunks))
                self._chunked(chunks)

            def _whole(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _chunked(self, chunks: Sequence[bytes]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                    self.wfile.flush()
                if scripted._truncate:
                    self.close_connection = True
                else:
                    self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *arguments: Any) -> None: ...

        return Handler


@contextmanager
def scripted_server(
    *scripts: Sequence[bytes], models: Sequence[str] = ("m",), status: int = 200, truncate: bool = False
) -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(scripts, models, status, truncate)
    thread = threading.Thread(target=scripted._server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield scripted
    finally:
        scripted._server.shutdown()
        thread.join()
        scripted._server.server_close()


def event(text: str, *, finish: str | None = None, error: str | None = None) -> bytes:
    """One V2 response as a server-sent event."""
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}]
    parameters: dict[str, Any] = {"index": 0}
    if finish:
        parameters["triton_final_response"] = True
        outputs.append({"name": "finish_reason", "datatype": "BYTES", "shape": [1], "data": [finish]})
    if error:
        parameters["error"] = error
    body = {"model_name": "m", "outputs": outputs, "parameters": parameters}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
