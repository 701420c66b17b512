"""Metrics with TorchServe's names: exact counts under load, and labels and types as its dashboards read them."""

from __future__ import annotations

import io
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_fd_to_metric_families
from prometheus_client.samples import Sample

from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetricsCollector
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


@pytest.mark.long
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


def _shown(collector: HandlerMetricsCollector) -> list[Sample]:
    """Returns the samples of handlers' own metrics, as a scraper reads them in both formats; each must occur once."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = openmetrics.generate_latest(registry).decode()
    samples = [sample for family in text_fd_to_metric_families(io.StringIO(text)) for sample in family.samples]
    assert samples and len({(each.name, *sorted(each.labels.items())) for each in samples}) == len(samples)
    return [each for each in samples if not each.name.startswith("torch_stream_")]


def _one(collector: HandlerMetricsCollector, name: str, **labels: str) -> float:
    (value,) = [each.value for each in _shown(collector) if each.name == name and labels.items() <= each.labels.items()]
    return value


def test_a_dimension_that_is_called_as_a_label_of_ours_takes_no_series_of_another_version() -> None:
    collector = HandlerMetricsCollector()
    for version, value in (("1", 2.0), ("2", 3.0)):
        dimensions = {"version": "own", "model": "mine", "exported_model": "x", "le": "9", "__name__": "n", "1st": "a"}
        collector.of("m", version).record("Calls", "counter", value, dimensions)
        collector.of("m", version).record("Sizes", "histogram", value, dimensions)
    own = {"exported_version": "own", "exported_exported_model": "mine", "exported_model": "x", "_1st": "a"}
    own |= {"exported_le": "9", "exported___name__": "n"}
    for name in ("torchserve_Calls_total", "torchserve_Sizes_sum"):
        assert _one(collector, name, model="m", version="1", **own) == 2.0
        assert _one(collector, name, model="m", version="2", **own) == 3.0
    collector.torchserve_names = True
    assert _one(collector, "Calls", version="own", model="mine") == 5.0


@pytest.mark.parametrize("torchserve_names", [False, True])
def test_metrics_whose_names_clash_are_dropped_counted_and_named_once(
    torchserve_names: bool, caplog: pytest.LogCaptureFixture
) -> None:
    collector = HandlerMetricsCollector()
    collector.torchserve_names = torchserve_names
    first, second = collector.of("m", "1"), collector.of("m", "2")
    first.record("C", "counter", 1.0, {})
    first.record("Sizes", "histogram", 1.0, {"a": "x"})
    first.record("Sizes", "histogram", 1.0, {"b": "x"})  # other dimensions are no clash
    for _ in range(2):
        first.record("C_total", "counter", 1.0, {})
        second.record("C_total", "gauge", 1.0, {})
        second.record("Sizes_sum", "gauge", 1.0, {})
    assert _one(collector, "torchserve_C_total") == 1.0
    assert _one(collector, "torchserve_Sizes_sum", a="x") == _one(collector, "torchserve_Sizes_sum", b="x") == 1.0
    assert [first.dropped_metric_values, second.dropped_metric_values] == [2, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "Model 'm': values of the handler's metric 'C_total' are dropped: the counter C already has this name",
        "Model 'm': values of the handler's metric 'C_total' are dropped: the counter C already has this name",
        "Model 'm': values of the handler's metric 'Sizes_sum' are dropped: the histogram Sizes already has this name",
    ]


def test_series_above_the_bound_are_dropped_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    collector = HandlerMetricsCollector()
    metrics = collector.of("m", None)
    for number in range(1010):
        metrics.record("Calls", "counter", 1.0, {"user": str(number)})
    metrics.record("Calls", "counter", 1.0, {"user": "0"})
    assert len(_shown(collector)) == 1000 and metrics.dropped_metric_values == 10
    assert len(caplog.records) == 1 and "the handler already has 1000 series" in caplog.text


@pytest.mark.parametrize("asked", [False, True])
def test_the_names_are_there_on_request_only(asked: bool) -> None:
    collector = HandlerMetricsCollector()
    collector.torchserve_names = asked
    collector.of("m", None).record("Calls", "counter", 1.0, {})
    assert ("Calls" in {family.name for family in collector.collect()}) is asked
