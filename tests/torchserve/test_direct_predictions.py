"""A short prediction is answered without the app's layers: clients, metrics and log see the same as with them.

A body without a declared length is left to the app.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests import plain_http
from tests.server import raw
from tests.server.harness import Server
from tests.server.scrape import Scrape, on_rest_port, settled
from tests.torchserve.predicting import MAX_BYTES
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
    request_id = answer.headers.pop("x-request-id")
    answer.headers.pop("date", None)
    if "unknown" not in path:
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
