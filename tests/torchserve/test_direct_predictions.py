"""A short prediction is answered without the app's layers: clients, metrics and log see the same as with them.

A body without a declared length is left to the app.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests import plain_http
from tests.server import foreign, raw
from tests.server.harness import Model, Server, serve
from tests.server.scrape import Scrape, on_rest_port, settled
from tests.torchserve.predicting import ECHO, MAX_BYTES, SETTINGS, SHIM, TORCHSERVE
from tests.torchserve.workshop import write_handler
from tests.waiting import wait_until

_COUNTERS = ("rest_server_requests", "model_infer_request", "torch_stream_", "torchserve_", "ts_inference_requests")
_TIMES = re.compile(r".*(_sum|_bucket|_created|latency_microseconds|PredictionTime)")
_PATHS = ("/predictions/echo", "/predictions/assistant/1.0", "/predictions/hello", "/predictions/unknown")


@pytest.fixture(scope="module")
def server(predictions_server: Server) -> Server:
    return predictions_server


def _counts(scrape: Scrape) -> dict[tuple[str, ...], float]:
    """Returns all counts of requests, but no times."""
    return {
        (each.name, *(f"{name}={text}" for name, text in sorted(each.labels.items()))): each.value
        for each in scrape.samples
        if each.name.startswith(_COUNTERS) and not _TIMES.fullmatch(each.name)
    }


def _observed(server: Server, path: str, content: bytes | Iterator[bytes]) -> tuple[Any, ...]:
    """Returns everything that one request leaves behind, without ids and times: answer, counts and the log's line."""
    before, lines = _counts(on_rest_port(server)), len(server.log.splitlines())
    headers = {"content-type": "text/plain", "x-own": "mine"}
    answer = plain_http.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)
    idle = {"torch_stream_handler_waiting_requests": 0.0, "rest_server_requests_in_progress": 0.0}
    after = _counts(settled(server, lambda scrape: all(scrape.value(name) == idle[name] for name in idle)))
    request_id = answer.headers.pop("x-request-id", "no id")
    answer.headers.pop("date", None)
    if "unknown" not in path and request_id != "no id":
        wait_until(lambda: request_id in server.log, "the request's line")
    logged = [line for line in server.log.splitlines()[lines:] if request_id in line]
    shown = [re.sub(r"^[-\d]+ [\d:,]+|_ms=\S+", "", line.replace(request_id, "ID")) for line in logged]
    counted = {key: value - before.get(key, 0.0) for key, value in after.items() if value != before.get(key, 0.0)}
    body = answer.content.replace(request_id.encode(), b"ID")
    return answer.status_code, sorted(answer.headers.multi_items()), body, counted, shown


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("text", [b"plain", b"created", b"nothing", b"teapot", b"split", b"raise", b"pieces"])
def test_it_looks_as_if_the_app_had_answered(server: Server, path: str, text: bytes) -> None:
    directly, by_the_app = _observed(server, path, text), _observed(server, path, iter([text]))
    assert directly == by_the_app
    assert sum(directly[3].values()) > 0 and bool(directly[4]) == ("unknown" not in path)


_FORM = b'--x\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\n1\r\n--x--\r\n'
_NAMED = "X-Request-Id: mine"
_VARIED = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=date: )[^\r]+|(?<=keep-alive: )[^\r]+")


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/predictions/echo", b"", ()),
        ("/predictions/echo?query=1", b"a=%20&b=2&b=3", ("Content-Type: application/x-www-form-urlencoded", _NAMED)),
        ("/predictions/echo", _FORM, ("Content-Type: multipart/form-data; boundary=x", _NAMED)),
        ("/predictions/echo", b"{", ("CONTENT-TYPE: Application/JSON", "X-Own: a", "x-own: b", _NAMED)),
        ("/predictions/%65cho", b"plain", ("Content-Type: text/plain", "X-Request-Id-Prefix: mine")),
        ("/predictions/assistant/1%2E0", b"plain", ("Content-Type: text/plain", "X-Request-Id: ä")),
        ("/predictions/assistant/2.0", b"plain", (_NAMED,)),
        ("/predictions/echo/", b"plain", (_NAMED,)),
        ("/predictions//echo", b"plain", (_NAMED,)),
        ("/predictions/tokens", b"plain", (_NAMED,)),
        ("/predictions/speaker/v1/models", b"", (_NAMED,)),
        ("/predictions/echo", b"code 200", ("Content-Type: text/plain", _NAMED)),
    ],
)
def test_the_bytes_of_an_answer_are_those_that_the_app_sends(
    server: Server, path: str, body: bytes, headers: tuple[str, ...]
) -> None:
    def answered(request: bytes) -> bytes:
        with raw.connected(server) as connection:
            connection.sendall(request)
            return _VARIED.sub(b"?", raw.read_all(connection))

    headers = (*headers, "Connection: close")
    in_chunks = raw.head(path, "Transfer-Encoding: chunked", *headers) + raw.chunked([body] if body else [])
    directly = answered(raw.post(path, body, *headers))
    assert directly.startswith(b"HTTP/1.1 ") and directly == answered(in_chunks)


def test_a_length_may_have_any_number_of_leading_zeros(server: Server) -> None:
    request = raw.head("/predictions/echo", f"Content-Length: {'0' * 5000}5", "Connection: close") + b"plain"
    with raw.connected(server) as connection:
        connection.sendall(request)
        assert raw.read_all(connection).startswith(b"HTTP/1.1 200 ")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Version 1.0 of ``two`` is a handler; its default version, 2.0, is a model of another runtime."""
    folder = tmp_path_factory.mktemp("mixed")
    shutil.copy(foreign.__file__, folder / "foreign.py")
    ours = Model("two", write_handler(folder / "echo", ECHO), implementation=TORCHSERVE, extra=SHIM, version="1.0")
    theirs = Model("two", None, "foreign.Foreign", version="2.0")
    (folder / "models" / "theirs").mkdir(parents=True)
    (folder / "models" / "theirs" / "model-settings.json").write_text(json.dumps(theirs.settings()))
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    with serve(folder / "models", [ours], settings=SETTINGS, environment=environment) as running:
        ready = f"{running.url}/v2/models/two/versions/1.0/ready"  # it may load after the default version
        wait_until(lambda: plain_http.get(ready).status_code == 200, "version 1.0 is ready")
        yield running


@pytest.mark.parametrize(
    ("path", "text", "status"),
    [
        ("/predictions/two/1.0", b"plain", 200),
        ("/predictions/two/1.0", b"pieces", 200),
        ("/predictions/two/1.0", b"teapot", 404),
        ("/predictions/two", b"plain", 404),
        ("/predictions/two/2.0", b"plain", 404),
        ("/predictions/two/3.0", b"plain", 404),
    ],
)
def test_a_version_may_be_a_handler_though_the_default_version_is_none(
    mixed: Server, path: str, text: bytes, status: int
) -> None:
    directly, by_the_app = _observed(mixed, path, text), _observed(mixed, path, iter([text]))
    assert directly == by_the_app and directly[0] == status


def test_a_body_that_is_larger_than_the_server_allows_is_refused_at_its_head(server: Server) -> None:
    with raw.connected(server) as connection:
        connection.sendall(raw.head("/predictions/echo", f"Content-Length: {MAX_BYTES + 1}"))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_requests_that_are_sent_ahead_are_answered_in_their_order(server: Server) -> None:
    texts = [b"one", b"pieces", b"two", b"raise", b"three"]
    requests = [raw.post("/predictions/echo", text, "Content-Type: text/plain") for text in texts]
    requests.append(raw.post("/predictions/echo", b"end", "Content-Type: text/plain", "Connection: close"))
    with raw.connected(server) as connection:
        connection.sendall(b"".join(requests))
        got = raw.read_all(connection)
    found = re.findall(rb'HTTP/1.1 (\d+)|"str",\s+"(\w+)"|(connection: close)', got)
    assert [b"".join(each) for each in found] == [
        *(b"200", b"one", b"200", b"200", b"two", b"503", b"200", b"three", b"200", b"connection: close", b"end")
    ]


def test_a_body_may_come_in_pieces(server: Server) -> None:
    request = raw.post("/predictions/echo", b"in pieces", "Content-Type: text/plain", "Connection: close")
    with raw.connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(request)):
            connection.sendall(request[at : at + 1])
        assert b"in pieces" in raw.read_all(connection)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_client_that_leaves_is_counted_as_such(server: Server, missing: int) -> None:
    """It leaves before the answer, or before the end of its body, and so before the handler."""

    def left(scrape: Scrape) -> tuple[float, float]:
        by_path = scrape.by("path", "rest_server_requests_total", status_code="499")
        by_outcome = scrape.by("outcome", "torch_stream_handler_requests_total", model="echo")
        return by_path.get("/predictions/{model_name}", 0.0), by_outcome.get("cancelled", 0.0)

    requests, handled = left(on_rest_port(server))
    request = raw.post("/predictions/echo", b"slow", "Content-Type: text/plain")
    with raw.connected(server) as connection:
        connection.sendall(request[: len(request) - missing])
        settled(server, lambda scrape: scrape.value("rest_server_requests_in_progress") == 1.0)
    expected = (requests + 1, handled + (not missing))
    last = settled(server, lambda scrape: left(scrape) == expected)
    assert last.value("rest_server_requests_in_progress") == 0.0
