"""Metrics under TorchServe's names: exact counts under load, labels and types as its dashboards read them."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlserver_torch_stream.torchserve.handler_metrics import HandlerMetricsCollector
from tests import plain_http
from tests.server.harness import Server
from tests.server.scrape import Scrape, on_metrics_port, on_rest_port, settled

_CLIENTS, _EACH = 16, 25
_HOST = socket.gethostname()
_MODEL = {"ModelName": "metered", "Level": "Model", "Hostname": _HOST}
_REQUESTS = {"model_name": "metered", "model_version": "default", "hostname": _HOST}
_TOTAL = "ts_inference_requests_total"


def _grown(now: Scrape, before: Scrape, name: str, **labels: str) -> float:
    then = [each.value for each in before.samples if each.name == name and labels.items() <= each.labels.items()]
    return now.value(name, **labels) - sum(then)


def _ask(server: Server, model: str, count: int) -> None:
    for _ in range(count):
        assert plain_http.post(f"{server.url}/predictions/{model}", content=b"x", timeout=60).status_code == 200


def test_every_request_is_counted_once_under_load(predictions_server: Server) -> None:
    server, before, begun = predictions_server, on_rest_port(predictions_server), time.monotonic()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        for done in [pool.submit(_ask, server, "metered", _EACH) for _ in range(_CLIENTS)]:
            done.result()
    sent = _CLIENTS * _EACH
    now = settled(server, lambda scrape: _grown(scrape, before, _TOTAL, **_REQUESTS) >= sent)
    assert _grown(now, before, _TOTAL, **_REQUESTS) == sent
    ended = {"model": "metered", "outcome": "ok"}
    assert _grown(now, before, "torch_stream_handler_requests_total", **ended) == sent
    for name in ("Calls", "calls_total", "Sizes_count", "Sizes_bucket"):
        assert _grown(now, before, name, **_MODEL) == sent, name
    assert _grown(now, before, "Sizes_sum", **_MODEL) == sent / 2
    assert now.value("Calls", Kind="test", **_MODEL) == now.value("torchserve_Calls_total", Kind="test")
    assert now.value("HandlerTime", **_MODEL) == 7
    inferred = _grown(now, before, "ts_inference_latency_microseconds", **_REQUESTS)
    queued = _grown(now, before, "ts_queue_latency_microseconds", **_REQUESTS)
    assert 0 < queued < inferred < _CLIENTS * (time.monotonic() - begun) * 1e6


def test_token_models_are_counted_too(predictions_server: Server) -> None:
    labels = {"model_name": "tokens", "model_version": "1.0"}
    before = on_rest_port(predictions_server)
    url = f"{predictions_server.url}/predictions/tokens/1.0/v1/completions"
    assert plain_http.post(url, json={"model": "m", "prompt": "Hello", "max_tokens": 3}, timeout=60).status_code == 200
    now = settled(predictions_server, lambda scrape: _grown(scrape, before, _TOTAL, **labels) >= 1)
    assert _grown(now, before, _TOTAL, **labels) == 1
    assert _grown(now, before, "ts_inference_latency_microseconds", **labels) > 0


def test_both_ports_show_the_names(predictions_server: Server) -> None:
    _ask(predictions_server, "metered", 1)
    for scrape in (on_rest_port(predictions_server), on_metrics_port(predictions_server)):
        assert scrape.names("ts_") == {
            _TOTAL,
            "ts_inference_latency_microseconds",
            "ts_queue_latency_microseconds",
        }
        assert scrape.names("Calls") == {"Calls"}


def test_the_versions_of_a_model_are_added_up_and_what_does_not_fit_is_left_out() -> None:
    collector = HandlerMetricsCollector()
    collector.torchserve_names = True
    for version, value in (("1", 2.0), ("2", 3.0)):
        metrics = collector.of("m", version)
        metrics.record("Calls", "counter", value, {"ModelName": "m"})
        metrics.record("Time", "gauge", value, {"ModelName": "m"})
        metrics.record("Sizes", "histogram", value, {"ModelName": "m", "Hostname": "mine"})
    collector.of("m", "2").record("Calls", "gauge", 9.0, {"ModelName": "m"})
    shown = {
        (sample.name, sample.labels["Hostname"]): sample.value
        for family in collector.collect()
        for sample in family.samples
        if not family.name.startswith("torch")
    }
    assert shown == {
        ("Calls", _HOST): 5.0,
        ("Time", _HOST): 3.0,
        ("Sizes_bucket", "mine"): 2.0,
        ("Sizes_count", "mine"): 2.0,
        ("Sizes_sum", "mine"): 5.0,
    }


@pytest.mark.parametrize("asked", [False, True])
def test_the_names_are_there_on_request_only(asked: bool) -> None:
    collector = HandlerMetricsCollector()
    collector.torchserve_names = asked
    collector.of("m", None).record("Calls", "counter", 1.0, {})
    assert ("Calls" in {family.name for family in collector.collect()}) is asked
