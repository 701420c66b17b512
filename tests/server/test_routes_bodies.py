"""Limits of bodies, even if they are compressed or chunked; malformed bodies get a 422, never a 400 or 500."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.server.rest.connection import ClientLeft, parse_object, read_body
from tests import plain_http
from tests.server import raw, v2
from tests.server.conftest import SMALL_BODY
from tests.server.harness import Server

_ENDPOINTS = ("infer", "generate", "infer_stream", "generate_stream")
_BODY = json.dumps(v2.rest_body("Hello " * 50, max_tokens=2)).encode()
_BOMB = gzip.compress(b" " * 50_000_000)


def _post(server: Server, endpoint: str, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{server.url}/v2/models/tiny/{endpoint}"
    return plain_http.post(url, content=content, headers=named, timeout=v2.TIMEOUT_S)


@pytest.mark.parametrize("endpoint", _ENDPOINTS)
@pytest.mark.parametrize(
    ("content", "coding", "status", "said"),
    [
        (b" " * (SMALL_BODY + 1), None, 413, "20000 bytes"),
        (_BOMB, "gzip", 413, "20000 bytes"),
        (_BODY, "br", 415, "content-encoding"),
        (_BODY, "gzip", 422, "content-encoding"),
        (gzip.compress(_BODY)[:-9], "gzip", 422, "content-encoding"),
        (b"", None, 422, "body"),
        (b"{", None, 422, "body"),
        (b"\xff", None, 422, "body"),
        (b"[]", None, 422, "body"),
        (b"[" * SMALL_BODY, None, 422, "body"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, None, 422, "body"),
        (b"{}", None, 422, "inputs"),
        (b'{"inputs": [{"name": "text_input"}]}', None, 422, "inputs.0.shape"),
        (b'{"inputs": 1, "id": {}}', None, 422, "id"),
    ],
)
def test_a_bad_body_has_its_row_of_the_table(
    slow: Server, endpoint: str, content: bytes, coding: str | None, status: int, said: str
) -> None:
    response = _post(slow, endpoint, content, **({"content_encoding": coding} if coding else {}))
    assert response.status_code == status, response.text
    assert said in response.json()["error"]


def test_a_chunked_body_is_counted_as_it_comes(slow: Server) -> None:
    with raw.connected(slow) as connection:
        connection.sendall(raw.head("/v2/models/tiny/infer", "Transfer-Encoding: chunked"))
        for _ in range(SMALL_BODY // 4096 + 1):  # and no end
            connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_declared_size_is_refused_before_it_is_sent(slow: Server) -> None:
    with raw.connected(slow) as connection:
        connection.sendall(
            raw.head("/v2/models/tiny/infer", f"Content-Length: {SMALL_BODY + 1}", "Expect: 100-continue")
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_packed_and_chunked_bodies_are_read(slow: Server) -> None:
    plain = _post(slow, "infer", _BODY).json()["outputs"]
    assert _post(slow, "infer", gzip.compress(_BODY), content_encoding="gzip").json()["outputs"] == plain
    members = gzip.compress(_BODY[:20]) + gzip.compress(_BODY[20:])
    assert _post(slow, "infer", members, content_encoding="gzip").json()["outputs"] == plain
    parts = (_BODY[at : at + 1] for at in range(len(_BODY)))
    assert _post(slow, "infer", parts).json()["outputs"] == plain


# --- without a server: every way of cutting a body up ---


def _read(messages: list[dict[str, Any]], most: int, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(waiting)

    return parse_object(asyncio.run(read_body({"type": "http", "headers": list(headers)}, receive, most)))


def _in_parts(content: bytes, size: int) -> list[dict[str, Any]]:
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return [{"type": "http.request", "body": part, "more_body": True} for part in parts] + [{"type": "http.request"}]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_a_body_is_the_same_however_it_is_cut(size: int, packed: bool) -> None:
    content = gzip.compress(_BODY) + gzip.compress(b"") if packed else _BODY
    headers = [(b"content-encoding", b"GZIP")] if packed else []
    assert _read(_in_parts(content, size), len(_BODY), *headers) == json.loads(_BODY)
    with pytest.raises(RequestError) as caught:
        _read(_in_parts(content, size), len(_BODY) - 1, *headers)
    assert caught.value.status == 413


def test_no_more_is_unpacked_than_the_bound() -> None:
    """The 900 bytes decompress to about 900,000."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            _read(_in_parts(_BOMB[:900], 65536), 1000, (b"content-encoding", b"gzip"))
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_client_that_leaves_while_sending_is_no_error() -> None:
    with pytest.raises(ClientLeft):
        _read([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}], 100)
