"""Bytes that are not valid HTTP: the server answers 4xx or closes the connection, and serves all others meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests import plain_http
from tests.reliability.conftest import MAX_BODY
from tests.reliability.counts import counts, idle
from tests.reliability.reciter import recital
from tests.reliability.usage import MIB, rss_of, usage_of
from tests.server import raw, v2
from tests.server.harness import Server

_INFER = "/v2/models/recite/infer"
_STREAM = "/v2/models/recite/infer_stream"
_BODY = json.dumps(v2.rest_body("Hello", max_tokens=3)).encode()
_QUIET_S = 1.0  # after which a server that waits for more is taken to wait


def _unharmed(server: Server) -> None:
    reply = v2.rest_unary(server.url, _INFER, v2.rest_body("Hello", max_tokens=9))
    assert reply.text == recital(9)
    assert server.process.poll() is None


def _say(server: Server, data: bytes, answered: bool = False) -> bytes:
    """Sends the data and ends the sending side. Returns what the server answers.

    Waits for the first bytes for as long as the server needs if it is known that the data is ``answered``.
    """
    with raw.connected(server) as connection:
        with suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(OSError):
            if answered:
                received = connection.recv(65536)
            connection.settimeout(_QUIET_S)
            while part := connection.recv(65536):
                received += part
        return received


def _statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


_CUT = {
    "a chunk that is cut": raw.head(_INFER, "Transfer-Encoding: chunked") + b"ff\r\n" + _BODY[:20],
    "no last chunk": raw.head(_INFER, "Transfer-Encoding: chunked") + raw.chunked([_BODY])[:-5],
    "less than its length": raw.head(_INFER, f"Content-Length: {len(_BODY) + 100}") + _BODY,
    "half a head": raw.head(_INFER)[:30],
    "no body": raw.head(_STREAM, "Content-Length: 10"),
}


@pytest.mark.parametrize("what", _CUT)
def test_a_request_that_breaks_off_is_no_request(plain: Server, what: str) -> None:
    before = idle(plain, "recite")
    statuses = _statuses(_say(plain, _CUT[what]))
    assert all(400 <= status < 500 for status in statuses)
    _unharmed(plain)
    assert counts(plain, "recite").errors(500) == before.errors(500)


_WRONG = {
    "a chunk's size that is no number": raw.head(_INFER, "Transfer-Encoding: chunked") + b"zz\r\n" + _BODY + b"\r\n",
    "a chunk longer than its size": raw.head(_INFER, "Transfer-Encoding: chunked")
    + b"5\r\n"
    + _BODY
    + b"\r\n0\r\n\r\n",
    "a negative length": raw.head(_INFER, "Content-Length: -5") + _BODY,
    "two lengths": raw.head(_INFER, "Content-Length: 5", f"Content-Length: {len(_BODY)}") + _BODY,
    "a length that is too large for anybody": raw.head(_INFER, "Content-Length: 99999999999999999999999999") + _BODY,
    "a length of words": raw.head(_INFER, "Content-Length: many") + _BODY,
    "garbage": os.urandom(4096),
    "zeros": bytes(4096),
    "TLS": bytes.fromhex("16030100f8010000f40303") + os.urandom(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50),
    "a line for ever": b"POST /" + b"a" * 200_000,
    "a header for ever": raw.head(_INFER)[:-2] + b"X: " + b"a" * 200_000,
    "no such method": b"EXPLODE " + raw.head(_INFER, "Content-Length: 0")[5:],
}


@pytest.mark.parametrize("what", _WRONG)
def test_bytes_that_are_wrong_are_refused(plain: Server, what: str) -> None:
    statuses = _statuses(_say(plain, _WRONG[what]))
    assert all(400 <= status < 500 for status in statuses), statuses
    _unharmed(plain)


def test_more_than_its_length_is_not_read_as_its_body(plain: Server) -> None:
    """Further bytes are read as the next request, which is malformed.

    The HTTP server closes the connection, often before the first request is answered.
    """
    received = _say(plain, raw.post(_INFER, _BODY) + b"more than was announced")
    assert set(_statuses(received)) <= {200, 400}
    idle(plain, "recite")
    _unharmed(plain)


def test_requests_that_are_sent_ahead_are_answered_in_turn(plain: Server) -> None:
    several = [raw.post(_INFER, v2.rest_body("Hello", max_tokens=count)) for count in range(1, 9)]
    with raw.connected(plain) as connection:
        connection.sendall(b"".join(several[:-1]) + several[-1].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        received = raw.read_all(connection)
    assert _statuses(received) == [200] * 8
    places = [received.index(json.dumps(recital(count), ensure_ascii=False).encode()) for count in (1, 4, 8)]
    assert places == sorted(places)


def test_a_stream_behind_a_stream_on_one_connection(plain: Server) -> None:
    stream = raw.post(_STREAM, v2.rest_body("Hello", max_tokens=20))
    with raw.connected(plain) as connection:
        connection.sendall(stream + stream.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        received = raw.read_all(connection)
    assert _statuses(received) == [200, 200]
    assert received.count(b'"triton_final_response":true') == 2


@pytest.mark.parametrize("depth", [1_000, 30_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"inputs":[{"data":['])
def test_deep_json_is_refused(plain: Server, depth: int, opening: bytes) -> None:
    body = (opening * depth)[: MAX_BODY - 1]
    assert _statuses(_say(plain, raw.post(_INFER, body), answered=True))[:1] == [422]
    whole = b'{"inputs":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    assert _statuses(_say(plain, raw.post(_STREAM, whole), answered=True))[:1] == [422]
    _unharmed(plain)


def test_a_compression_bomb_is_not_unpacked(plain: Server) -> None:
    bomb = gzip.compress(gzip.compress(b" " * 100_000_000, 9), 9)
    inner = gzip.decompress(bomb)
    assert len(bomb) < MAX_BODY
    begun = rss_of(plain)
    for body in (bomb, inner):
        received = _say(plain, raw.post(_INFER, body, "Content-Encoding: gzip"), answered=True)
        assert _statuses(received)[:1] == [413]
    assert rss_of(plain) - begun < 32 * MIB
    _unharmed(plain)


@contextmanager
def _dribbling(server: Server, count: int) -> Iterator[None]:
    """Runs ``count`` clients that each send a byte of their head now and then."""
    over = threading.Event()
    with ExitStack() as stack:
        connections = [stack.enter_context(raw.connected(server)) for _ in range(count)]

        def dribble() -> None:
            for byte in raw.head(_INFER, "X: " + "a" * 500):
                for connection in connections:
                    with suppress(OSError):
                        connection.send(bytes([byte]))
                if over.wait(0.05):
                    return

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_slow_heads_hold_up_nobody_and_are_let_go(plain: Server) -> None:
    before = usage_of(plain)
    with _dribbling(plain, 200):
        for _ in range(10):
            _unharmed(plain)
        assert plain_http.get(f"{plain.url}/v2/health/live", timeout=10).status_code == 200
    end = time.monotonic() + 20
    while usage_of(plain).descriptors > before.descriptors + 2:
        assert time.monotonic() < end, "their connections are still held"
        time.sleep(0.1)
