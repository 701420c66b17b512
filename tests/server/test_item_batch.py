"""Malformed bodies for ``/v2/models/{model}/batch``, and clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
import struct

import pytest

from mlserver_torch_stream.handlers.frames import DROPPED, FrameBuffer, encode_frame
from tests.server.harness import HOST, Server
from tests.waiting import wait_until

_PATH = "/v2/models/tiny/batch"
_LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "model": "tiny", "n": 4}


def _post(server: Server, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=20)
    try:
        connection.request("POST", _PATH, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"\xff" * 8, "body"),
        (struct.pack("!II", 20 << 20, 0), "body"),
        (struct.pack("!II", 2, 0) + b"{]", "body"),
        (struct.pack("!II", 9_000, 0) + b"[" * 9_000, "body"),
        (encode_frame({}), "batch"),
        (encode_frame({"batch": [], "items": 1}), "batch"),
        (encode_frame({"batch": 1, "items": "1"}), "items"),
        (encode_frame({"batch": 1, "items": 0}), "items"),
        (encode_frame({"cancel": {}}), "cancel"),
    ],
)
def test_a_body_that_is_no_batch_is_refused(server: Server, body: bytes, field: str) -> None:
    status, said = _post(server, body)
    assert status == 400
    assert json.loads(said)["error"]["param"] == field


@pytest.mark.parametrize("header", [{}, {"path": []}, {"path": "/v1/none"}])
def test_an_item_without_a_path_is_refused_by_name(server: Server, header: dict[str, object]) -> None:
    status, said = _post(server, encode_frame({"batch": 1, "items": 1}) + encode_frame(header, b"{}"))
    buffer = FrameBuffer()
    buffer.feed(said)
    assert status == 200 and buffer.take() == ({"batch": 1, "items": 1}, b"")
    answer = buffer.take()
    assert answer is not None and answer[0]["status"] == 400
    assert json.loads(answer[1])["error"]["param"] == "path"


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_body_that_is_too_large_is_dropped_in_whatever_pieces_it_comes(size: int) -> None:
    frames = [({"a": 1}, b"x" * 100), ({"b": 2}, b"y" * 500), ({}, b""), ({"c": 3}, b"z" * 101), ({"d": 4}, b"")]
    sent, buffer, found = b"".join(encode_frame(*frame) for frame in frames), FrameBuffer(max_bytes=100, drops=True), []
    for at in range(0, len(sent), size):
        buffer.feed(sent[at : at + size])
        while (frame := buffer.take()) is not None:
            found.append(frame)
    frames[1], frames[3] = ({"b": 2, DROPPED: 500}, b""), ({"c": 3, DROPPED: 101}, b"")
    assert found == frames


def test_what_follows_the_first_batch_and_is_none_ends_the_connection(server: Server) -> None:
    item = encode_frame({"batch": 1, "items": 1}) + encode_frame(
        {"path": "/v1/completions"}, json.dumps(_LONG).encode()
    )
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        _post(server, item + item)
    wait_until(lambda: "1 is already being answered" in server.log, "the reason")
    server.wait_for("tiny", lambda counters: counters["running_sequences"] == 0)


def test_a_client_that_leaves_after_its_last_batch_ends_it(server: Server) -> None:
    before = server.counters("tiny")["generation_tokens"]
    item = encode_frame({"path": "/v1/completions"}, json.dumps(_LONG).encode())
    body = encode_frame({"batch": 1, "items": 40}) + item * 40
    with socket.create_connection((HOST, server.http_port)) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (_PATH.encode(), len(body)))
        connection.sendall(body)
        server.wait_for("tiny", lambda counters: counters["generation_tokens"] > before)
    after = server.wait_for("tiny", lambda counters: counters["running_sequences"] == 0)
    assert after["generation_tokens"] - before < 40 * 4 * 900
