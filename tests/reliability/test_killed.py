"""A client is killed at token 0, 1 or 7: row and cache are freed at once, and no further step is spent on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.calls import PLAIN_ENDPOINTS, Endpoint, calling
from tests.reliability.counts import Counts, counts, idle, until
from tests.reliability.wire import wired
from tests.server.harness import Server

_LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}
_TOKENS = (0, 1, 7)
_BOUND_S = 60.0
_CLIENT = """
import sys
from pathlib import Path
from tests.reliability.calls import Endpoint, calling
from tests.server.harness import Server

http, grpc = map(int, sys.argv[2:4])
server = Server(http, grpc, 0, Path(), None)
with calling(Endpoint(sys.argv[1]), server, "recite", max_tokens=2000, ignore_eos=True) as call:
    call.end()
"""


def _kill(server: Server, endpoint: Endpoint, token: int) -> None:
    """Breaks the connection after ``token`` tokens, as it breaks when the client's process is killed."""
    before = idle(server, "recite")
    with wired(server) as (far, rest, grpc_wire), calling(endpoint, far, "recite", **_LONG) as call:
        if token and endpoint.streams:
            call.read(token)
        else:
            until(server, "recite", lambda now: _began(now, before, token))
        (rest if endpoint.rest else grpc_wire).cut()
        _is_forgotten(server, before)


def _began(now: Counts, before: Counts, token: int) -> bool:
    arrived = now["waiting_requests"] or now["prefilling_requests"] or now["running_sequences"]
    return bool(arrived) and now["generation_tokens"] - before["generation_tokens"] >= token


def _is_forgotten(server: Server, before: Counts) -> None:
    after = until(server, "recite", lambda now: now["cancelled_sequences"] - before["cancelled_sequences"] == 1)
    # The same figures: whoever is counted as cancelled holds nothing any more.
    assert after["running_sequences"] == after["waiting_requests"] == after["prefilling_requests"] == 0
    assert after["kv_cache_bytes"] == 0
    assert after["wasted_tokens"] == before["wasted_tokens"] == 0
    assert after["generation_tokens"] - before["generation_tokens"] < _LONG["max_tokens"]
    until(server, "recite", lambda now: now.requests("cancelled") - before.requests("cancelled") == 1)


@pytest.mark.long
@pytest.mark.parametrize("endpoint", PLAIN_ENDPOINTS)
@pytest.mark.parametrize("token", _TOKENS)
def test_a_killed_client_holds_nothing(slow: Server, endpoint: Endpoint, token: int) -> None:
    for _ in range(2):
        _kill(slow, endpoint, token)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", PLAIN_ENDPOINTS)
@pytest.mark.parametrize("token", _TOKENS)
def test_two_hundred_killed_clients_hold_nothing(slow: Server, endpoint: Endpoint, token: int) -> None:
    for _ in range(17):  # times twelve
        _kill(slow, endpoint, token)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", PLAIN_ENDPOINTS)
def test_a_process_that_is_killed_holds_nothing(slow: Server, endpoint: Endpoint) -> None:
    """SIGKILL leaves the client no time to close anything."""
    before = counts(slow, "recite")
    command = [sys.executable, "-c", _CLIENT, endpoint.value, str(slow.http_port), str(slow.grpc_port)]
    client = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        until(slow, "recite", lambda now: now["running_sequences"] == 1, _BOUND_S)
    finally:
        client.kill()
        client.wait(_BOUND_S)
    _is_forgotten(slow, before)
