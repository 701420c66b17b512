"""Thousands of requests, a tenth of which are left: memory, descriptors, threads and tasks do not grow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import grpc
import httpx
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.reliability.conftest import QUIET
from tests.reliability.counts import idle
from tests.reliability.usage import CENSUS, MIB, PYTHON_PATH, Usage, slope, usage_of
from tests.server import raw, v2
from tests.server.harness import Model, Server, serve

_SHARE_LEFT = 11  # of so many requests one is left: 20,000 and 2,000
_ROUND = 220  # RSS is noisy: memory comes and goes by megabytes, so there are many samples
_TOKENS = 4
_CLIENTS = 4
_ROUNDS = 100
_WARM_UP = 25  # rounds: allocators, caches and thread pools fill
_SLOPE = 1 * MIB  # per 10,000 requests


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("soak") / "models"
    models = [Model("tiny", str(tiny_model)), CENSUS]
    with serve(folder, models, settings=QUIET, environment={"PYTHONPATH": PYTHON_PATH}, forked=False) as running:
        yield running


class _Client:
    """A client that calls every endpoint in turn, and leaves some of its answers."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._http = httpx.Client(verify=False, base_url=server.url, timeout=v2.TIMEOUT_S)
        self._channel = grpc.insecure_channel(server.grpc_target)
        self._stub = Stub(self._channel)
        self._endpoints: list[Callable[[], None]] = [
            self._rest_unary, self._rest_stream, self._grpc_unary, self._grpc_stream
        ]  # fmt: skip
        self._leaves = [self._leave_rest, self._leave_grpc]

    def run(self, requests: int) -> None:
        for number in range(requests):
            endpoints = self._leaves if number % _SHARE_LEFT == 0 else self._endpoints
            self._dice.choice(endpoints)()

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def _prompt(self) -> str:
        return "Hello " * self._dice.randint(1, 20)

    def _rest_unary(self) -> None:
        body = v2.rest_body(self._prompt(), max_tokens=_TOKENS, ignore_eos=True)
        reply = v2.rest_reply(self._http.post("/v2/models/tiny/infer", json=body).raise_for_status().json())
        assert reply.outputs["num_output_tokens"] == [_TOKENS]

    def _rest_stream(self) -> None:
        body = v2.rest_body(self._prompt(), max_tokens=_TOKENS, ignore_eos=True)
        content = self._http.post("/v2/models/tiny/infer_stream", json=body).raise_for_status().content
        assert content.count(b'"triton_final_response":true') == 1

    def _grpc_unary(self) -> None:
        request = v2.grpc_request("tiny", self._prompt(), max_tokens=_TOKENS, ignore_eos=True)
        assert v2.grpc_reply(self._stub.ModelInfer(request, timeout=v2.TIMEOUT_S)).final

    def _grpc_stream(self) -> None:
        request = v2.grpc_request("tiny", self._prompt(), max_tokens=_TOKENS, ignore_eos=True)
        replies = list(self._stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S))
        assert v2.grpc_reply(replies[-1]).final

    def _leave_rest(self) -> None:
        body = v2.rest_body(self._prompt(), max_tokens=900, ignore_eos=True)
        path = f"/v2/models/tiny/{self._dice.choice(['infer', 'infer_stream'])}"
        with raw.connected(self._server) as connection:
            connection.sendall(raw.post(path, body))
            if path.endswith("stream"):
                connection.recv(100)

    def _leave_grpc(self) -> None:
        request = v2.grpc_request("tiny", self._prompt(), max_tokens=900, ignore_eos=True)
        call = self._stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S)
        list(islice(call, self._dice.randint(0, 3)))
        call.cancel()


def _soak(server: Server, rounds: int) -> list[Usage]:
    """Returns what the idle server held after each round that follows the warm-up."""
    clients = [_Client(server, seed) for seed in range(_CLIENTS)]
    found = []
    try:
        with ThreadPoolExecutor(_CLIENTS) as pool:
            for number in range(_WARM_UP + rounds):
                list(pool.map(lambda client: client.run(_ROUND // _CLIENTS), clients))
                idle(server, "tiny")
                if number >= _WARM_UP:
                    found.append(usage_of(server))
    finally:
        for client in clients:
            client.close()
    return found


def _growth(usages: list[Usage]) -> dict[str, float]:
    """Returns the growth per 10,000 requests of everything that is held."""
    requests = [_ROUND * number for number in range(len(usages))]
    return {
        name: 10_000 * slope(requests, [getattr(usage, name) for usage in usages])
        for name in ("rss", "descriptors", "threads", "tasks")
    }


@pytest.mark.slow
def test_twenty_thousand_requests_and_two_thousand_that_are_left(server: Server) -> None:
    usages = _soak(server, _ROUNDS)
    slopes = _growth(usages)
    print(f"per 10,000 requests: RSS {slopes['rss'] / MIB:+.3f} MiB of {usages[0].rss / MIB:.0f}, {slopes}")
    assert slopes["rss"] <= _SLOPE, [usage.rss // 1024 for usage in usages]
    for name in ("descriptors", "threads", "tasks"):
        values = [getattr(usage, name) for usage in usages]
        assert max(values) - min(values) <= 2 and abs(slopes[name]) <= 1, (name, values)


@pytest.mark.long
def test_hundreds_of_requests_leave_no_task_and_no_descriptor(plain: Server) -> None:
    client = _Client(plain, 99)
    try:
        client.run(100)
        idle(plain, "tiny")
        before = usage_of(plain)
        client.run(300)
        idle(plain, "tiny")
        after = usage_of(plain)
    finally:
        client.close()
    assert abs(after.tasks - before.tasks) <= 2
    assert abs(after.descriptors - before.descriptors) <= 2
    assert after.threads - before.threads <= 2
