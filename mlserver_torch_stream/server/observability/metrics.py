"""Exports the metrics of requests, engines and weights under all their names, and switches the request log and tracing
on.

Labels are a model's name and version, from its settings, and a ``finish_reason`` or a ``status_code`` from a fixed
list, so no text of a client becomes a label. If vLLM has the same metric, the name follows vLLM's.

The endpoint picker of the Gateway API inference extension needs ``num_requests_waiting`` and the use of the cache, and
newer versions need ``num_requests_running`` (docs/proposals/003-model-server-protocol in
kubernetes-sigs/gateway-api-inference-extension). That page calls the use of the cache ``gpu_cache_usage_perc``, which
vLLM renamed to ``kv_cache_usage_perc`` in 0.9, so both are exported. It requires ``lora_requests_info`` only from
servers of LoRA adapters. The other names are listed at docs.vllm.ai/en/stable/usage/metrics, where
``time_per_output_token_seconds`` is the old name of ``inter_token_latency_seconds``. Their only label is
``model_name``, so the values of a model's versions are added up.

Under TorchServe's names a model without a version has the version ``default``. TorchServe's counters of microseconds
have no suffix ``_total``; they are exported with the type ``untyped``, because prometheus_client would add the suffix
to a counter.

``install`` runs when MLServer registers a model of ours, because MLServer's settings cannot be read earlier.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from operator import attrgetter
from threading import Lock

from mlserver.settings import Settings
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlserver_torch_stream.engine.api import COUNTERS, EngineStats
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.server.host import ServerHost, export_metrics
from mlserver_torch_stream.server.observability.request_observer import (
    Labels,
    ModelRequests,
    RequestMetrics,
    RequestSinks,
)
from mlserver_torch_stream.server.observability.request_reports import TextLog, join_mlservers_log, span_starter
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.types import FinishReason

_VLLM_PREFIX = "vllm:"
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


def vllm_families(
    gauges: dict[Labels, EngineStats], counters: dict[Labels, EngineStats], requests: list[tuple[Labels, ModelRequests]]
) -> Iterator[Metric]:
    """Yields the metrics under vLLM's names."""
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
    family = kind(_VLLM_PREFIX + name, _help(name), labels=(_LABEL,))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family


def _request_success(requests: list[tuple[Labels, ModelRequests]]) -> Metric:
    """Returns vLLM's count of requests. It counts sequences, because vLLM counts a request with n sequences n times."""
    name = "request_success"
    family = CounterMetricFamily(_VLLM_PREFIX + name, _help(name), labels=(_LABEL, "finished_reason"))
    totals: dict[tuple[str, str], int] = {}
    for (model, _), counts in requests:
        for reason, finished in _FINISHED.items():
            totals[model, finished] = totals.get((model, finished), 0) + counts.sequences[reason.value]
    for labels, value in totals.items():
        family.add_metric(labels, value)
    return family


def _histogram(name: str, field: str, requests: list[tuple[Labels, ModelRequests]]) -> Metric:
    family = HistogramMetricFamily(_VLLM_PREFIX + name, _help(name), labels=(_LABEL,))
    for model in dict.fromkeys(labels[0] for labels, _ in requests):
        parts = [getattr(counts, field) for labels, counts in requests if labels[0] == model]
        family.add_metric((model,), _added([part.buckets() for part in parts]), sum(part.sum for part in parts))
    return family


def _added(buckets: Iterable[list[tuple[str, float]]]) -> list[tuple[str, float]]:
    return [(column[0][0], sum(count for _, count in column)) for column in zip(*buckets, strict=True)]


def _help(name: str) -> str:
    return f"vLLM's metric {name}"


_TORCHSERVE_LABELS = ("model_name", "model_version", "hostname")
_MICROSECONDS = 1e6
_LATENCIES: dict[str, Callable[[ModelRequests], float]] = {
    "ts_inference_latency_microseconds": lambda counts: counts.success.seconds * _MICROSECONDS,
    "ts_queue_latency_microseconds": lambda counts: counts.queued.seconds * _MICROSECONDS,
}


def torchserve_families(requests: list[tuple[Labels, ModelRequests]]) -> Iterator[Metric]:
    """Yields the metrics under TorchServe's names."""
    host = socket.gethostname()
    total = CounterMetricFamily(
        "ts_inference_requests", "TorchServe's metric of requests that have ended", None, _TORCHSERVE_LABELS
    )
    for (model, version), counts in requests:
        total.add_metric((model, version or "default", host), sum(counts.requests.values()))
    yield total
    for name, read in _LATENCIES.items():
        latency = Metric(name, f"TorchServe's metric {name}, of requests that succeeded", "unknown")
        for (model, version), counts in requests:
            latency.add_sample(
                name, dict(zip(_TORCHSERVE_LABELS, (model, version or "default", host), strict=True)), read(counts)
            )
        yield latency


_PREFIX = "torch_stream_"
_LABELS = ("model", "version")
_GAUGE_NAMES = tuple(each.name for each in fields(EngineStats) if each.name not in COUNTERS)


class EngineMetrics:
    """The sums of the counts of each model's engines; during a reload a model has two engines.

    The counters of an engine's ``stats()`` begin at 0, but the sums are not reset by a reload.
    """

    def __init__(self) -> None:
        self._engines: dict[Labels, list[Callable[[], EngineStats]]] = {}
        self._attentions: dict[Labels, str] = {}
        self._past: dict[Labels, EngineStats] = {}  # the counts of engines that were removed
        self._lock = Lock()  # scrapes run in a thread

    def add(self, model: str, version: str | None, stats: Callable[[], EngineStats], attention: str) -> None:
        """Adds a running engine, whose counts ``stats`` returns."""
        with self._lock:
            self._attentions[model, version or ""] = attention
            engines = self._engines.setdefault((model, version or ""), [])
            if stats not in engines:  # a reload without changes keeps the engine
                engines.append(stats)

    def remove(self, model: str, version: str | None, stats: Callable[[], EngineStats]) -> None:
        """Removes an engine that has stopped, and keeps its counts."""
        labels = (model, version or "")
        with self._lock:
            engines = self._engines.get(labels, [])
            if stats not in engines:
                return
            engines.remove(stats)
            if not engines:
                del self._engines[labels], self._attentions[labels]
            self._past[labels] = stats().counting_on(self._past.get(labels, EngineStats()))

    def gauges(self) -> dict[Labels, EngineStats]:
        """Returns the current values of the loaded models' engines."""
        with self._lock:
            return {labels: _sum_of_gauges([stats() for stats in engines]) for labels, engines in self._engines.items()}

    def attentions(self) -> dict[Labels, str]:
        """Returns the name of each loaded model's attention implementation, taken from its newest engine."""
        with self._lock:
            return dict(self._attentions)

    def counters(self) -> dict[Labels, EngineStats]:
        """Returns the counters of all models since the process began."""
        with self._lock:
            totals = dict(self._past)
            for labels, engines in self._engines.items():
                for stats in engines:
                    totals[labels] = stats().counting_on(totals.get(labels, EngineStats()))
            return totals


def _sum_of_gauges(parts: list[EngineStats]) -> EngineStats:
    return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in _GAUGE_NAMES})


_INFO = (
    "1 for each loaded model. `attention` names what computes its attention: `kernels` (this package's), `varlen` "
    "(torch's, for GPUs), `torch` (its operators, over gathered keys), `transformers` (the model's own) or `vllm`"
)
_ENGINE_GAUGES = {
    "running_sequences": "Sequences that decode, or wait to be computed again after a preemption",
    "waiting_requests": "Prompts in the queue",
    "waiting_tokens": "Tokens of the prompts in the queue",
    "prefilling_requests": "Admitted prompts that are being computed",
    "open_prompts": "Prompts that are being sent in pieces; they do not count towards `max_num_seqs`",
    "kv_cache_bytes": "Bytes of the pages and states that sequences hold now; a page that several share counts once, "
    "and nothing is set aside for `max_tokens`",
    "kv_cache_budget_bytes": "Bytes that pages and states may take",
    "prefix_cache_bytes": "Bytes of pages that no sequence holds and that are kept for later prompts",
    "kv_cache_usage_ratio": "The share of the budget that sequences hold, from 0 to 1; near 1 sequences are preempted",
}
# The gauges that are computed from several fields.
_COMPUTED: dict[str, Callable[[EngineStats], float]] = {
    "kv_cache_budget_bytes": lambda now: now.kv_cache_budget,
    "kv_cache_usage_ratio": lambda now: now.kv_cache_bytes / now.kv_cache_budget if now.kv_cache_budget else 0.0,
}
_ENGINE_COUNTERS = {
    "decode_steps": "Steps in which sequences decoded",
    "mixed_steps": "Steps that decoded sequences and also computed prompts, whose share `step_target` limits",
    "mixed_step_seconds": "Seconds of those steps; divided by `mixed_steps`, the mean pause that prompts cause",
    "prefill_tokens": "Tokens of prompts, and of preempted sequences, that were computed",
    "prefix_cache_hit_tokens": "Prompt tokens that were found in pages of other sequences, and not computed",
    "generation_tokens": "Tokens that were generated, whether or not a client read them",
    "num_preemptions": "Times that a sequence lost its pages to an older one and was computed again. If it grows "
    "steadily, raise `kv_cache_memory` or lower `max_num_seqs`",
    "draft_tokens": "Tokens that prompt lookup drafted (the setting `speculative`)",
    "accepted_draft_tokens": "Drafted tokens that were right; divided by `draft_tokens`, the acceptance rate",
    "forced_tokens": "Tokens that a constraint left no choice about; they take no step of their own",
    "cancelled_sequences": "Sequences whose client disconnected",
    "timed_out_sequences": "Sequences that timed out, in the queue or later",
    "wasted_tokens": "Tokens decoded in a step that began after their stream had closed",
}
_REQUEST_COUNTERS = {
    "requests": (
        "finish_reason",
        "Requests by the gravest finish reason of their sequences, or as `cancelled` or `refused`",
    ),
    "sequences": ("finish_reason", "Sequences by finish reason; those of a client that disconnected are `abort`"),
    "request_errors": ("status_code", "Requests that failed, by the REST status of their error, also over gRPC"),
}
_REQUEST_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token", "From a request's start to its first event, tokenizing included"),
    "inter_token_latency_seconds": (
        "inter_token",
        "Between a sequence's tokens; k tokens in one event count as k gaps of a k-th of the time since the last event",
    ),
    "request_queue_time_seconds": ("queue", "The longest wait of a request's prompts before their prefill began"),
    "e2e_request_latency_seconds": (
        "request",
        "From a request's start to its last event; refused and cancelled requests are left out",
    ),
}


class TokenMetrics(Collector):
    """Exports the counts of engines and of requests, by model and version."""

    def __init__(self, engines: EngineMetrics, requests: RequestMetrics) -> None:
        self.vllm_names = False
        self.torchserve_names = False
        self._engines = engines
        self._requests = requests

    def describe(self) -> Iterator[Metric]:
        """Yields the names of our metrics, so that the registry refuses another collector with the same names."""
        return self._own({}, {}, {}, [])

    def collect(self) -> Iterator[Metric]:
        gauges, counters, requests = self._engines.gauges(), self._engines.counters(), self._requests.items()
        yield from self._own(self._engines.attentions(), gauges, counters, requests)
        if self.vllm_names:
            yield from vllm_families(gauges, counters, requests)
        if self.torchserve_names:
            yield from torchserve_families(requests)

    def _own(
        self,
        attentions: dict[Labels, str],
        gauges: dict[Labels, EngineStats],
        counters: dict[Labels, EngineStats],
        requests: list[tuple[Labels, ModelRequests]],
    ) -> Iterator[Metric]:
        yield GaugeMetricFamily(_PREFIX + "loaded_models", "Models that are loaded", value=len(gauges))
        info = GaugeMetricFamily(_PREFIX + "model_info", _INFO, labels=(*_LABELS, "attention"))
        for labels, attention in attentions.items():
            info.add_metric((*labels, attention), 1)
        yield info
        for name, text in _ENGINE_GAUGES.items():
            read = _COMPUTED.get(name, attrgetter(name))
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


class WeightsMetrics(Collector):
    """Exports the counts of the weights and engines that the models of this process share."""

    def __init__(self, resources: ProcessResources) -> None:
        self._resources = resources

    def collect(self) -> Iterator[Metric]:
        weights, engines = self._resources.weights, self._resources.engines
        text = "Copies of weights in memory, each shared by all models that name the same files and devices"
        yield GaugeMetricFamily(_PREFIX + "loaded_weights", text, value=len(weights))
        yield GaugeMetricFamily(_PREFIX + "engines", "Engines that accept requests", value=len(engines))
        text = "Weights loaded since the process began; a reload of unchanged files loads none"
        yield CounterMetricFamily(_PREFIX + "weight_loads", text, value=weights.made)
        text = (
            "Loads of weights that were checked although an earlier start could have recorded the checks, by `reason`: "
            "`new`, `weights`, `code`, `chip`, `damaged` or `foreign` (others can write the record)"
        )
        checks = CounterMetricFamily(_PREFIX + "weight_checks", text, labels=("reason",))
        for reason, count in self._resources.checks.copy().items():
            checks.add_metric((reason,), count)
        yield checks


_HEALTH = "/health"


def install(
    host: ServerHost,
    options: ServerOptions,
    metrics: TokenMetrics,
    weights: WeightsMetrics,
    sinks: RequestSinks,
) -> None:
    """Exports the metrics at MLServer's endpoints, and sets the sinks of requests. Called once for a server."""
    settings = host.settings
    metrics.vllm_names = options.vllm_metric_names
    metrics.torchserve_names = options.torchserve_metric_names
    registry = partial(_registry, collectors=(metrics, weights))
    export_metrics(registry)
    routes = [Route(_HEALTH, partial(_health, host))]
    if settings.metrics_endpoint:
        routes.append(Route(settings.metrics_endpoint, _scraper(partial(registry, settings))))
    host.add_routes(routes)
    join_mlservers_log()
    structured = settings.use_structured_logging
    sinks.log = TextLog(prompts=options.log_prompts, structured=structured) if options.log_requests else None
    sinks.start_span = span_starter(settings)


def _registry(settings: Settings, collectors: Iterable[Collector]) -> CollectorRegistry:
    """Returns a registry of MLServer's metrics and ours. If MLServer has workers, it exports only metrics that are
    stored in files.
    """
    if not settings.parallel_workers:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    for collector in collectors:
        registry.register(collector)
    return registry


def _scraper(registry: Callable[[], CollectorRegistry]) -> Callable[[Request], Awaitable[Response]]:
    """Returns an endpoint that answers scrapes one at a time, in the order of their arrival.

    Otherwise a scraper that sends a request before its previous one is answered, such as aiperf, could see counters
    decrease: of two threads that read the counters, the one that reads first may answer last.
    """
    turn = asyncio.Lock()

    async def scrape(request: Request) -> Response:
        async with turn:
            text = await run_in_threadpool(lambda: generate_latest(registry()))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return scrape


async def _health(host: ServerHost, request: Request) -> Response:
    is_ready = bool(await host.data_plane.ready())
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)
