"""Repeated reloads, unloads and loads under streams: each stream is answered completely or refused at its start."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests import plain_http
from tests.reliability.calls import PLAIN_ENDPOINTS, Endpoint, Result, ask
from tests.reliability.conftest import QUIET
from tests.reliability.counts import idle
from tests.reliability.reciter import recital
from tests.reliability.usage import CENSUS, MIB, PYTHON_PATH, Usage, usage_of
from tests.server.harness import Model, Server, serve
from tests.server.scrape import on_rest_port

_TOKENS = 30
_REFUSALS = {404, 503, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_NEVER = {Endpoint.GRPC_UNARY: grpc.StatusCode.UNAVAILABLE}  # Seldon's agent would load the model once more
_FAST, _SLOW = 10, 334  # rounds of three: reload, unload, load
_WARM_UP = 3  # rounds
_AWAY_S = 0.02  # a refused client's pause, so that loading has the cores


@pytest.fixture(scope="module")
def server(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``twin`` keeps the weights of ``recite``; without it, each round would load them again, which takes longer."""
    environment = {"PYTHONPATH": PYTHON_PATH, "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.001"}
    models = [Model("recite", str(recite)), Model("twin", str(recite), extra={"max_num_seqs": 2}), CENSUS]
    folder = tmp_path_factory.mktemp("reloads") / "models"
    with serve(folder, models, settings=QUIET, environment=environment) as running:
        yield running


class _Streams:
    """Runs one client per endpoint, which sends one request after the other."""

    def __init__(self, server: Server) -> None:
        self.results: Counter[object] = Counter()
        self._server = server
        self._over = threading.Event()

    def run(self, endpoint: Endpoint) -> None:
        while not self._over.is_set():
            result = ask(endpoint, self._server, "recite", max_tokens=_TOKENS)
            verdict = self._verdict(result)
            self.results[verdict] += 1
            if verdict == "refused":
                time.sleep(_AWAY_S)

    def stop(self) -> None:
        self._over.set()

    @staticmethod
    def _verdict(result: Result) -> object:
        if result.code is not None:
            assert result.code in _REFUSALS, (result.endpoint, result.code)
            assert result.code != _NEVER.get(result.endpoint), (result.endpoint, result.code)
            assert not result.replies, "refused at its start or not at all"
            return "refused"
        assert (result.reasons, result.text) == (["length"], recital(_TOKENS)), result.endpoint
        return "answered"


def _repository(server: Server, what: str, model: str = "recite") -> None:
    response = plain_http.post(f"{server.url}/v2/repository/models/{model}/{what}", timeout=60)
    assert response.status_code == 200, response.text


def _go_round(server: Server, times: int) -> Counter[object]:
    streams = _Streams(server)
    with ThreadPoolExecutor(len(PLAIN_ENDPOINTS)) as pool:
        clients = [pool.submit(streams.run, endpoint) for endpoint in PLAIN_ENDPOINTS]
        try:
            for _ in range(times):
                for what in ("load", "unload", "load"):
                    _repository(server, what)
        finally:
            streams.stop()
        for client in clients:
            client.result(60)
    return streams.results


def _settled(server: Server) -> Usage:
    idle(server, "recite")
    return usage_of(server)


def _check(server: Server, times: int, engines: int = 2) -> None:
    _go_round(server, _WARM_UP)
    before = _settled(server)
    results = _go_round(server, times)
    after = _settled(server)
    assert results["answered"] > times / 2, results
    scrape = on_rest_port(server)
    assert scrape.value("torch_stream_loaded_weights") == 1
    assert scrape.value("torch_stream_engines") == scrape.value("torch_stream_loaded_models") == engines
    assert abs(after.threads - before.threads) <= 2
    assert abs(after.descriptors - before.descriptors) <= 4
    assert abs(after.tasks - before.tasks) <= 4
    assert after.rss - before.rss < 64 * MIB


@pytest.mark.slow
def test_thirty_reloads_unloads_and_loads(server: Server) -> None:
    _check(server, _FAST)


@pytest.mark.slow
def test_a_thousand_reloads_unloads_and_loads(server: Server) -> None:
    _check(server, _SLOW)


@pytest.mark.slow
def test_weights_that_come_and_go_leave_nothing(server: Server) -> None:
    _repository(server, "unload", "twin")
    loads = on_rest_port(server).value("torch_stream_weight_loads_total")
    try:
        _check(server, _FAST, engines=1)
        assert on_rest_port(server).value("torch_stream_weight_loads_total") - loads >= _FAST
    finally:
        _repository(server, "load", "twin")
