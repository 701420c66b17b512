"""REST over a plain socket, for what no HTTP client would do: stop reading, leave early, send malformed bytes.

Implements only as much of HTTP/1.1 as the tests need.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from tests.server.harness import HOST, Server
from tests.server.v2 import TIMEOUT_S


@contextmanager
def connected(server: Server, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with closing(socket.socket()) as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(TIMEOUT_S)
        connection.connect((HOST, server.http_port))
        yield connection


def post(path: str, body: Mapping[str, Any] | bytes, *headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, f"Content-Length: {len(raw)}", *headers) + raw


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", f"Host: {HOST}", *headers, "", ""]).encode()


def chunked(parts: Iterable[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def read_late(server: Server, path: str, body: Mapping[str, Any], tokens: int) -> list[str]:
    """Returns the events of a stream whose reader reads nothing before ``tiny`` has generated ``tokens`` tokens."""
    before = server.counters("tiny")["generation_tokens"]
    with connected(server, receive_buffer=4096) as connection:
        connection.sendall(post(path, body, "Connection: close"))
        server.wait_for("tiny", lambda now: now["generation_tokens"] - before >= tokens)
        # All events wait by now; in windows of 4 KiB their bytes would come for 10 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, 1 << 20)
        lines = read_all(connection).decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def read_all(connection: socket.socket) -> bytes:
    """Returns all bytes that arrive until the server ends the connection, in whatever way."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received
