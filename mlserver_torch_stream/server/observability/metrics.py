"""All metrics of this process's token models, in prometheus_client's default registry, read at scrape time.

Knows nothing of who scrapes. Registered once per process: MLServer never reloads this module, and the registry refuses
a second collector with the same names. The labels are a model's name and version, as its settings have them, and a
``reason`` or ``error`` out of a fixed list: nothing that a client writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.server.observability import vllm_names
from mlserver_torch_stream.server.observability.engine_metrics import EngineMetrics, Labels
from mlserver_torch_stream.server.observability.request_metrics import ModelRequests, RequestMetrics

_PREFIX = "torch_stream_"
_LABELS = ("model", "version")
_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "running_sequences": ("Rows that are being decoded now", lambda now: now.running_sequences),
    "waiting_requests": ("Prompts that are queued", lambda now: now.waiting_requests),
    "waiting_tokens": ("Tokens of the prompts that are queued", lambda now: now.waiting_tokens),
    "prefilling_requests": ("Prompts that are in prefill", lambda now: now.prefilling_requests),
    "open_prompts": ("Prompts that are being sent in pieces", lambda now: now.open_prompts),
    "kv_cache_bytes": ("KV cache reserved by running and prefilling rows", lambda now: now.kv_cache_bytes),
    "kv_cache_budget_bytes": ("KV cache that may be reserved at most", lambda now: now.kv_cache_budget),
    "prefix_cache_bytes": (
        "KV cache of prompts kept for later ones that begin alike",
        lambda now: now.prefix_cache_bytes,
    ),
    "kv_cache_use_ratio": (
        "Share of the KV cache's budget that is reserved",
        lambda now: now.kv_cache_bytes / now.kv_cache_budget if now.kv_cache_budget else 0.0,
    ),
}
_ENGINE_COUNTERS = {
    "decode_steps": "Decode steps of the whole batch",
    "prefill_tokens": "Prompt tokens prefilled",
    "prefix_hit_tokens": "Prompt tokens that were copied from an earlier prompt instead",
    "generated_tokens": "Tokens generated, also those that nobody read",
    "cancelled_sequences": "Sequences that ended because their client left",
    "timed_out_sequences": "Sequences that ended because their time was over, in the queue or later",
    "zombie_steps": "Rows decoded in a step that began after their stream was closed",
}
_REQUEST_COUNTERS = {
    "requests": ("reason", "Requests by the gravest finish reason of their sequences, or `cancelled`, or `refused`"),
    "sequences": ("reason", "Sequences by finish reason; those of a client that left are `abort`"),
    "request_errors": ("error", "Requests that failed, by REST status, whichever door they came through"),
}
_REQUEST_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token", "From a request's start to its first event, tokenizing included"),
    "inter_token_latency_seconds": (
        "inter_token",
        "Between a sequence's tokens; k tokens that came as one event are k gaps of a k-th of the time since the last",
    ),
    "queue_time_seconds": ("queue", "The longest wait of a request's prompts before their prefill began"),
    "request_seconds": ("request", "From a request's start to its last event; without refused and cancelled ones"),
}


class TokenMetrics(Collector):
    """What the engines and the watched requests have counted, by model and version."""

    def __init__(self, engines: EngineMetrics, requests: RequestMetrics) -> None:
        self.vllm_names = False
        self._engines = engines
        self._requests = requests

    def describe(self) -> Iterator[Metric]:
        """Our own names, so that nobody else takes them."""
        return self._own({}, {}, [])

    def collect(self) -> Iterator[Metric]:
        gauges, counters, requests = self._engines.gauges(), self._engines.counters(), self._requests.items()
        yield from self._own(gauges, counters, requests)
        if self.vllm_names:
            yield from vllm_names.families(gauges, counters, requests)

    def _own(
        self,
        gauges: dict[Labels, EngineStats],
        counters: dict[Labels, EngineStats],
        requests: list[tuple[Labels, ModelRequests]],
    ) -> Iterator[Metric]:
        yield GaugeMetricFamily(_PREFIX + "loaded_models", "Models whose engine is here", value=len(gauges))
        for name, (text, read) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for labels, stats in gauges.items():
                gauge.add_metric(labels, read(stats))
            yield gauge
        for name, text in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for labels, stats in counters.items():
                counter.add_metric(labels, getattr(stats, name))
            yield counter
        yield from _of_requests(requests)


def _of_requests(requests: list[tuple[Labels, ModelRequests]]) -> Iterator[Metric]:
    for name, (label, text) in _REQUEST_COUNTERS.items():
        counter = CounterMetricFamily(_PREFIX + name, text, labels=(*_LABELS, label))
        for labels, counts in requests:
            for value, count in getattr(counts, name.removeprefix("request_")).items():
                counter.add_metric((*labels, value), count)
        yield counter
    for name, (field, text) in _REQUEST_HISTOGRAMS.items():
        histogram = HistogramMetricFamily(_PREFIX + name, text, labels=_LABELS)
        for labels, counts in requests:
            observed = getattr(counts, field)
            histogram.add_metric(labels, observed.buckets(), observed.sum)
        yield histogram


ENGINES = EngineMetrics()
REQUESTS = RequestMetrics()
METRICS = TokenMetrics(ENGINES, REQUESTS)
REGISTRY.register(METRICS)
