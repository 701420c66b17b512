"""HTTP/1 as some clients use it: an offer of HTTP/2 followed by a body, HTTP/1.0, and requests that never end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from mlserver_torch_stream.client import EventParser
from tests.server import raw, v2
from tests.server.harness import Server
from tests.waiting import wait_until

_OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
_BODY = json.dumps(v2.rest_body("Hello fox", max_tokens=4)).encode()
_INFER = "/v2/models/tiny/infer"
_STREAM = "/v2/models/tiny/infer_stream"


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """The answer to a client that offers nothing."""
    return v2.rest_unary(server.url, _INFER, json.loads(_BODY)).text


def _answers(connection: socket.socket, count: int) -> Iterator[tuple[int, bytes]]:
    """Yields statuses and bodies of answers with a declared length, one after another on one connection."""
    with closing(connection.makefile("rb")) as received:
        for _ in range(count):
            status = int(received.readline().split()[1])
            length = 0
            while (line := received.readline().strip()) != b"":
                name, _, value = line.lower().partition(b":")
                length = int(value) if name == b"content-length" else length
            yield status, received.read(length)


def _text(body: bytes) -> str:
    return v2.rest_reply(json.loads(body)).text


@pytest.mark.parametrize("path", [_INFER, "/v2/models/tiny/generate", "/v2/models/tiny/versions/v1/infer"])
def test_a_body_behind_an_offer_of_http2_is_read(server: Server, text: str, path: str) -> None:
    with raw.connected(server) as connection:
        connection.sendall(raw.post(path, _BODY, *_OFFER))
        assert [(status, _text(body)) for status, body in _answers(connection, 1)] == [(200, text)]


def test_it_is_read_in_whatever_packets_it_comes(server: Server, text: str) -> None:
    request = raw.post(_INFER, _BODY, *_OFFER)
    with raw.connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(request)):
            connection.sendall(request[at : at + 1])
        assert [_text(body) for _, body in _answers(connection, 1)] == [text]


def test_it_is_read_in_chunks(server: Server, text: str) -> None:
    head = raw.head(_INFER, "Transfer-Encoding: chunked", *_OFFER)
    with raw.connected(server) as connection:
        connection.sendall(head + raw.chunked([_BODY[:9], _BODY[9:]]))
        assert [_text(body) for _, body in _answers(connection, 1)] == [text]


def test_a_client_that_waits_for_100_continue_is_told_once(server: Server, text: str) -> None:
    head = raw.head(_INFER, f"Content-Length: {len(_BODY)}", "Expect: 100-continue", *_OFFER)
    with raw.connected(server) as connection:
        connection.sendall(head)
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(_BODY)
        assert [_text(body) for _, body in _answers(connection, 1)] == [text]


def test_several_such_requests_on_one_connection_are_all_read(server: Server, text: str) -> None:
    request = raw.post(_INFER, _BODY, *_OFFER)
    bodiless = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + "\r\n".join([*_OFFER, "", ""]).encode()
    with raw.connected(server) as connection:
        connection.sendall(request + bodiless + request + raw.post(_INFER, _BODY))
        statuses, bodies = zip(*_answers(connection, 4), strict=True)
    assert statuses == (200,) * 4
    assert [_text(body) for body in (bodies[0], *bodies[2:])] == [text] * 3


@pytest.mark.parametrize("body", [b"", b"{", b" " * 70_000])
def test_a_bad_body_behind_an_offer_has_its_own_row(server: Server, body: bytes) -> None:
    with raw.connected(server) as connection:
        connection.sendall(raw.post(_INFER, body, *_OFFER))
        ((status, said),) = _answers(connection, 1)
    assert status == 422 and b"body" in said


def test_a_body_that_is_no_http_behind_an_offer_is_400_and_the_end(server: Server, text: str) -> None:
    head = raw.head(_INFER, "Transfer-Encoding: chunked", *_OFFER)
    with raw.connected(server) as connection:
        connection.sendall(head + b"zz\r\n" + _BODY)
        assert raw.read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert v2.rest_unary(server.url, _INFER, json.loads(_BODY)).text == text


def test_a_stream_is_sent_to_a_client_that_offers_http2(server: Server, text: str) -> None:
    with raw.connected(server) as connection:
        connection.sendall(raw.post(_STREAM, _BODY, *_OFFER, "Connection: close"))
        head, _, events = raw.read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"chunked" in head.lower()
    assert b'"triton_final_response":true' in events


def test_other_paths_of_the_port_read_it_too(server: Server) -> None:
    with raw.connected(server) as connection:
        connection.sendall(raw.post("/v2/repository/index", b"{}", *_OFFER))
        ((status, body),) = _answers(connection, 1)
    assert status == 200 and {model["name"] for model in json.loads(body)} >= {"tiny"}


@pytest.mark.parametrize("head", [b"CONNECT nobody:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM"])
def test_what_is_no_request_for_us_ends_and_disturbs_nobody(server: Server, text: str, head: bytes) -> None:
    with raw.connected(server) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        raw.read_all(connection)
    assert v2.rest_unary(server.url, _INFER, json.loads(_BODY)).text == text


def _curl(server: Server, path: str, *options: str) -> str:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    command = [curl, "--silent", "--show-error", "--max-time", "60", *options, f"{server.url}{path}", "-d", "@-"]
    done = subprocess.run(command, input=_BODY, capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_curl_with_http2_is_answered(server: Server, text: str) -> None:
    assert _text(_curl(server, _INFER, "--http2").encode()) == text


def test_curl_with_http_1_0_is_answered(server: Server, text: str) -> None:
    assert _text(_curl(server, _INFER, "--http1.0").encode()) == text
    assert _joined(_curl(server, _STREAM, "--http1.0", "--no-buffer").encode()) == text


# --- HTTP/1.0 ---


def _old(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _joined(events: bytes) -> str:
    replies: list[Any] = [json.loads(event) for event in EventParser().feed(events)]
    return v2.joined(map(v2.rest_reply, replies))


def test_a_stream_to_an_http_1_0_client_is_ended_by_the_connection_and_has_no_chunks(server: Server, text: str) -> None:
    with raw.connected(server) as connection:
        connection.sendall(_old(_STREAM, _BODY))
        head, _, events = raw.read_all(connection).partition(b"\r\n\r\n")
    assert b" 200 " in head and b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: ")
    assert _joined(events) == text


@pytest.mark.parametrize("path", [_INFER, "/v2/models/nobody/infer_stream"])
def test_a_whole_answer_to_an_http_1_0_client_has_its_length(server: Server, path: str) -> None:
    with raw.connected(server) as connection:
        connection.sendall(_old(path, _BODY))
        head, _, body = raw.read_all(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower() and json.loads(body)


def test_a_client_that_ends_its_side_has_left(slow: Server) -> None:
    """nginx treats it in the same way, and docs/protocol.md says so."""
    with raw.connected(slow) as connection:
        connection.sendall(raw.post(_INFER, v2.rest_body("Hello", max_tokens=900, ignore_eos=True)))
        slow.wait_for("tiny", lambda counters: counters["running_sequences"] == 1)
        connection.shutdown(socket.SHUT_WR)
        assert raw.read_all(connection) == b""
    slow.wait_for("tiny", lambda counters: counters["running_sequences"] == 0)


# --- clients that leave, or never end a request ---


def test_a_client_that_leaves_ends_the_requests_that_it_has_sent_ahead(slow: Server) -> None:
    stream = raw.post(_STREAM, v2.rest_body("Hello", max_tokens=900, ignore_eos=True))  # 18 s of steps
    begun = len(slow.log)
    with raw.connected(slow) as connection:
        connection.sendall(stream * 3)
        slow.wait_for("tiny", lambda counters: counters["running_sequences"] == 1)
    slow.wait_for("tiny", lambda counters: counters["running_sequences"] == 0, seconds=8)
    wait_until(lambda: "client=disconnected" in slow.log[begun:], "the line of the request")
    assert "Traceback" not in slow.log[begun:]


def test_a_client_that_leaves_after_a_large_body_is_noticed(impatient: Server) -> None:
    """uvicorn stops reading at a large part of a body. Here this is the last part, as the server is stopped meanwhile;
    the parts before it make the kernel accept so many bytes.
    """
    body = json.dumps(v2.rest_body("Hello", max_tokens=900, ignore_eos=True)).encode() + b" " * 8_000_000
    with raw.connected(impatient) as connection:
        connection.sendall(raw.head(_INFER, f"Content-Length: {len(body)}") + body[:-200_000])
        time.sleep(0.3)  # the server waits for the last part
        os.kill(impatient.process.pid, signal.SIGSTOP)
        try:
            connection.sendall(body[-200_000:])
        finally:
            os.kill(impatient.process.pid, signal.SIGCONT)
        impatient.wait_for("tiny", lambda counters: counters["running_sequences"] == 1)
    impatient.wait_for("tiny", lambda counters: counters["running_sequences"] == 0, seconds=8)


@pytest.mark.parametrize(
    "begin",
    [
        b"POST /",
        raw.head(_INFER)[:-2] + b"X: ",
        raw.head(_INFER, "Transfer-Encoding: chunked") + b"1;x=",
        raw.head(_INFER, "Transfer-Encoding: chunked") + raw.chunked([_BODY])[:-2] + b"X: ",
    ],
    ids=["path", "header", "chunk extension", "trailer"],
)
def test_what_never_ends_beside_a_body_is_cut_off(server: Server, text: str, begin: bytes) -> None:
    sent = 0
    with raw.connected(server) as connection, suppress(OSError):
        connection.sendall(begin)
        while sent < 64 * 2**20:
            sent += connection.send(b"a" * 65536)
    assert sent < 64 * 2**20
    assert v2.rest_unary(server.url, _INFER, json.loads(_BODY)).text == text


def test_two_hosts_are_refused(server: Server) -> None:
    """RFC 9112, 3.2: a proxy before this server may have used the other one."""
    log = len(server.log)
    with raw.connected(server) as connection:
        connection.sendall(raw.post(_INFER, _BODY, "HOST: elsewhere"))
        answer = raw.read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"\r\n\r\nhost: given twice")
    assert "Traceback" not in server.log[log:]


def test_a_head_within_the_bound_may_have_many_headers(server: Server, text: str) -> None:
    with raw.connected(server) as connection:
        connection.sendall(raw.post(_INFER, _BODY, *(f"X-{number}: {'a' * 500}" for number in range(100))))
        assert [_text(body) for _, body in _answers(connection, 1)] == [text]


@pytest.mark.long
def test_clients_that_do_not_end_their_requests_are_disconnected(impatient: Server) -> None:
    whole = raw.post(_INFER, _BODY)
    begins = [b"", raw.head(_INFER)[:20], whole[:-5], whole + raw.head(_INFER)[:20]]
    with ExitStack() as stack:
        connections = [stack.enter_context(raw.connected(impatient)) for _ in begins]
        for connection, begin in zip(connections, begins, strict=True):
            connection.settimeout(15)  # the limit is 2 s
            connection.sendall(begin)
        answers = [raw.read_all(connection).count(b"HTTP/1.1") for connection in connections]
    assert answers == [0, 0, 0, 1]


@pytest.mark.long
def test_a_client_that_waits_for_its_answer_is_not_disconnected(impatient: Server) -> None:
    with raw.connected(impatient) as connection:
        for _ in range(2):
            connection.sendall(raw.post(_INFER, v2.rest_body("Hello", max_tokens=200, ignore_eos=True)))  # 4 s of steps
            assert [status for status, _ in _answers(connection, 1)] == [200]


@pytest.mark.long
def test_a_client_that_reads_none_of_its_whole_answers_is_disconnected(slow: Server) -> None:
    """The sockets buffer some megabytes before answers wait in the server."""
    begun = len(slow.log)
    with raw.connected(slow, receive_buffer=4096) as connection:
        connection.sendall(b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        wait_until(lambda: "has read nothing for 0.5 s: its connection is closed" in slow.log[begun:])
        assert raw.read_all(connection).count(b"HTTP/1.1 200") < 500
