"""Requests that arrive together and take long to decode let the event loop serve others between them."""

from __future__ import annotations

import json
import selectors
import socket

from tests.server.harness import HOST, Server
from tests.server.openai import CHAT, talk

_CLIENTS = 16


def test_others_are_answered_between_large_bodies_that_arrive_together(server: Server) -> None:
    """A busy machine may stop this process until all answers are there: then nothing is known of their order."""
    assert any(_place_of_another(server) < _CLIENTS // 2 for _ in range(10))


def _place_of_another(server: Server) -> int:
    """Sends large bodies and then a small request. Returns how many of the bodies are answered before the request.

    Each schema has many references; it is examined for about 20 ms and then refused.
    """
    parts = {f"p{i}": {"anyOf": [{"$ref": f"#/$defs/p{(i + j) % 400}"} for j in range(1, 60)]} for i in range(400)}
    schema = {"$defs": parts, "type": "object", "properties": {"a": {"$ref": "#/$defs/p0"}}, "required": ["a"]}
    body = json.dumps(
        talk(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    clients = [socket.create_connection((HOST, server.http_port)) for _ in range(_CLIENTS + 1)]
    live = clients[-1]
    order: list[socket.socket] = []
    try:
        for client in clients[:-1]:
            client.sendall(head + body[:-1])
        for client in clients[:-1]:
            client.sendall(body[-1:])
        live.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with selectors.DefaultSelector() as waiting:
            for client in clients:
                waiting.register(client, selectors.EVENT_READ)
            while len(order) <= _CLIENTS:
                for key, _ in waiting.select(30):
                    order.append(key.fileobj)  # type: ignore[arg-type]
                    waiting.unregister(key.fileobj)
        assert b" 400 " in clients[0].recv(100) and b" 200 " in live.recv(100)
    finally:
        for client in clients:
            client.close()
    return order.index(live)
