"""Ten times more requests than the server can handle: the excess is refused, others are served, nothing grows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.reliability.calls import ENDPOINTS, Endpoint, ask, calling
from tests.reliability.conftest import STEP_S
from tests.reliability.counts import counts, idle, until
from tests.reliability.flood import Answered, flood
from tests.reliability.reciter import recital
from tests.reliability.usage import rss_of
from tests.server import raw, v2
from tests.server.harness import Server

_TOKENS = 40
_ROWS, _QUEUE = 4, 8  # of ``busy``
_FULL_PER_S = _ROWS / (_TOKENS * STEP_S)  # what it could serve at most
_SAMPLE_S = 0.25
_DRIFT = 0.02


def _overload(server: Server, seconds: float) -> list[Answered]:
    body = v2.rest_body("Hello", max_tokens=_TOKENS)
    request = raw.post("/v2/models/busy/infer_stream", body, "Connection: close")
    return asyncio.run(flood(server.http_port, request, 10 * _FULL_PER_S, seconds))


def _check(server: Server, answers: list[Answered]) -> None:
    refused = [each for each in answers if each.status == 429]
    served = [each for each in answers if each.status == 200]
    assert len(refused) + len(served) == len(answers), {each.status for each in answers}
    assert served and len(refused) > 5 * len(served)
    assert all(int(each.headers["retry-after"]) >= 1 and json.loads(each.body)["error"] for each in refused)
    for each in served:
        assert each.whole
        replies = [v2.rest_reply(json.loads(event)) for event in EventParser().feed(_dechunked(each.body))]
        assert (v2.joined(replies), replies[-1].finish_reason) == (recital(_TOKENS), "length")
    idle(server, "busy")


def _dechunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


@pytest.mark.long
def test_ten_times_too_much_is_refused_and_the_rest_is_served(slow: Server) -> None:
    before = idle(slow, "busy")
    answers = _overload(slow, 3)
    _check(slow, answers)
    refused = sum(each.status == 429 for each in answers)
    until(slow, "busy", lambda now: now.errors(429) - before.errors(429) == refused)
    assert counts(slow, "busy").requests("refused") - before.requests("refused") == refused


@pytest.mark.slow
def test_a_minute_of_it_takes_no_memory(slow: Server) -> None:
    _check(slow, _overload(slow, 10))  # the warm-up
    begun = rss_of(slow)
    with _sampling(slow) as samples:
        _check(slow, _overload(slow, 60))
    drift = max(abs(sample - begun) for sample in samples) / begun
    assert drift < _DRIFT, f"RSS moved by {100 * drift:.1f} % from {begun / 2**20:.0f} MiB"


@contextmanager
def _sampling(server: Server) -> Iterator[list[int]]:
    samples: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            samples.append(rss_of(server))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


# --- every endpoint says it ---


@contextmanager
def _full(server: Server) -> Iterator[None]:
    """Occupies the only row of ``narrow`` and the only place in its queue."""
    idle(server, "narrow")
    parameters: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
    with calling(Endpoint.REST_STREAM, server, "narrow", **parameters) as running:
        running.read(1)
        with calling(Endpoint.REST_STREAM, server, "narrow", **parameters):
            until(server, "narrow", lambda now: now["waiting_requests"] == 1)
            yield


@pytest.mark.parametrize("endpoint", ENDPOINTS[:4])
def test_overload_is_429_with_retry_after_and_resource_exhausted(slow: Server, endpoint: Endpoint) -> None:
    with _full(slow):
        result = ask(endpoint, slow, "narrow", max_tokens=1)
    assert result.code == (429 if endpoint.rest else grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "waiting" in result.said
    if endpoint.rest:
        assert int(result.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["infer", "infer_stream", "generate", "generate_stream"])
def test_every_route_refuses(slow: Server, path: str) -> None:
    with _full(slow):
        url = f"{slow.url}/v2/models/narrow/{path}"
        response = plain_http.post(url, json=v2.rest_body("Hello"), timeout=v2.TIMEOUT_S)
    assert response.status_code == 429 and response.headers["content-type"] == "application/json"
    assert int(response.headers["retry-after"]) >= 1 and response.json()["error"]


def test_a_burst_of_hundreds_at_once_breaks_no_connection(slow: Server) -> None:
    idle(slow, "busy")
    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(lambda _: ask(Endpoint.REST_UNARY, slow, "busy", max_tokens=10), range(192)))
    assert {result.code for result in results} <= {None, 429}
    assert {result.text for result in results if result.code is None} == {recital(10)}
