"""Exports the counts of requests under TorchServe's names, for dashboards that read these names.

Knows no dashboard. A model without a version is ``default``, as TorchServe says of requests that name none. Counters of
microseconds have no suffix ``_total``, and so the type ``untyped``: prometheus_client would add the suffix.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from mlserver_torch_stream.server.observability.engine_metrics import Labels
from mlserver_torch_stream.server.observability.request_metrics import ModelRequests

_LABELS = ("model_name", "model_version", "hostname")
_MICROSECONDS = 1e6
_LATENCIES: dict[str, Callable[[ModelRequests], float]] = {
    "ts_inference_latency_microseconds": lambda counts: counts.success.seconds * _MICROSECONDS,
    "ts_queue_latency_microseconds": lambda counts: counts.queued.seconds * _MICROSECONDS,
}


def families(requests: list[tuple[Labels, ModelRequests]]) -> Iterator[Metric]:
    host = socket.gethostname()
    total = CounterMetricFamily(
        "ts_inference_requests", "TorchServe's metric of requests that have ended", None, _LABELS
    )
    for (model, version), counts in requests:
        total.add_metric((model, version or "default", host), sum(counts.requests.values()))
    yield total
    for name, read in _LATENCIES.items():
        latency = Metric(name, f"TorchServe's metric {name}, of requests that ended well", "unknown")
        for (model, version), counts in requests:
            latency.add_sample(name, dict(zip(_LABELS, (model, version or "default", host), strict=True)), read(counts))
        yield latency
