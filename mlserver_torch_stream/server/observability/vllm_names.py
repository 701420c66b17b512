"""Exports our metrics under vLLM's names, for routers that read these names.

Knows no router. The endpoint picker of the Gateway API inference extension needs ``num_requests_waiting`` and the use
of the cache, and newer ones ``num_requests_running`` (docs/proposals/003-model-server-protocol in
kubernetes-sigs/gateway-api-inference-extension). That page says ``gpu_cache_usage_perc``, which vLLM renamed to
``kv_cache_usage_perc`` in 0.9, so both are exported; ``lora_requests_info`` is for servers of LoRA adapters only. The
other names are those of docs.vllm.ai/en/stable/usage/metrics, where ``time_per_output_token_seconds`` is the old name
of ``inter_token_latency_seconds``. Their only label is ``model_name``, so the versions of a model are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.server.observability.engine_metrics import Labels
from mlserver_torch_stream.server.observability.request_metrics import ModelRequests
from mlserver_torch_stream.types import FinishReason

_PREFIX = "vllm:"
_LABEL = "model_name"
_FINISHED = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.TIMEOUT: "abort",
    FinishReason.ERROR: "error",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "first_token",
    "inter_token_latency_seconds": "inter_token",
    "time_per_output_token_seconds": "inter_token",
    "request_queue_time_seconds": "queue",
    "e2e_request_latency_seconds": "request",
}
_QUEUES: dict[str, Callable[[EngineStats], float]] = {
    "num_requests_running": lambda stats: stats.running_sequences + stats.prefilling_requests,
    "num_requests_waiting": lambda stats: stats.waiting_requests,
}
_TOKENS: dict[str, Callable[[EngineStats], float]] = {
    "prompt_tokens": lambda stats: stats.prefill_tokens + stats.prefix_cache_hit_tokens,
    "prefix_cache_queries": lambda stats: stats.prefill_tokens + stats.prefix_cache_hit_tokens,
    "prefix_cache_hits": lambda stats: stats.prefix_cache_hit_tokens,
    "generation_tokens": lambda stats: stats.generation_tokens,
    "num_preemptions": lambda stats: stats.num_preemptions,
    "spec_decode_num_draft_tokens": lambda stats: stats.draft_tokens,
    "spec_decode_num_accepted_tokens": lambda stats: stats.accepted_draft_tokens,
}


def families(
    gauges: dict[Labels, EngineStats], counters: dict[Labels, EngineStats], requests: list[tuple[Labels, ModelRequests]]
) -> Iterator[Metric]:
    used = _by_name(gauges, lambda stats: stats.kv_cache_bytes)
    budget = _by_name(gauges, lambda stats: stats.kv_cache_budget)
    usage = {name: used[name] / budget[name] if budget[name] else 0.0 for name in used}
    for name, read in _QUEUES.items():
        yield _family(GaugeMetricFamily, name, _by_name(gauges, read))
    yield _family(GaugeMetricFamily, "kv_cache_usage_perc", usage)
    yield _family(GaugeMetricFamily, "gpu_cache_usage_perc", usage)
    for name, read in _TOKENS.items():
        yield _family(CounterMetricFamily, name, _by_name(counters, read))
    yield _request_success(requests)
    for name, field in _HISTOGRAMS.items():
        yield _histogram(name, field, requests)


def _by_name(stats: dict[Labels, EngineStats], read: Callable[[EngineStats], float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for (model, _), of_version in stats.items():
        totals[model] = totals.get(model, 0) + read(of_version)
    return totals


def _family(
    kind: Callable[..., GaugeMetricFamily | CounterMetricFamily], name: str, values: dict[str, float]
) -> Metric:
    family = kind(_PREFIX + name, _help(name), labels=(_LABEL,))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family


def _request_success(requests: list[tuple[Labels, ModelRequests]]) -> Metric:
    """Counts sequences: vLLM counts a request with n sequences n times."""
    name = "request_success"
    family = CounterMetricFamily(_PREFIX + name, _help(name), labels=(_LABEL, "finished_reason"))
    totals: dict[tuple[str, str], int] = {}
    for (model, _), counts in requests:
        for reason, finished in _FINISHED.items():
            totals[model, finished] = totals.get((model, finished), 0) + counts.sequences[reason.value]
    for labels, value in totals.items():
        family.add_metric(labels, value)
    return family


def _histogram(name: str, field: str, requests: list[tuple[Labels, ModelRequests]]) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, _help(name), labels=(_LABEL,))
    for model in dict.fromkeys(labels[0] for labels, _ in requests):
        parts = [getattr(counts, field) for labels, counts in requests if labels[0] == model]
        family.add_metric((model,), _added([part.buckets() for part in parts]), sum(part.sum for part in parts))
    return family


def _added(buckets: Iterable[list[tuple[str, float]]]) -> list[tuple[str, float]]:
    return [(column[0][0], sum(count for _, count in column)) for column in zip(*buckets, strict=True)]


def _help(name: str) -> str:
    return f"vLLM's metric {name}"
