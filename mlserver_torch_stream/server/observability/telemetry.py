"""Adds metrics and a plain health check to the REST port, and switches the log of requests and tracing on.

It is installed when MLServer registers a model of ours: MLServer's settings cannot be read earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from mlserver.settings import Settings
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlserver_torch_stream.server.host import ServerHost, export_metrics
from mlserver_torch_stream.server.observability.metrics import TokenMetrics, WeightsMetrics
from mlserver_torch_stream.server.observability.request_log import (
    RequestLog,
    RequestSinks,
    join_mlservers_log,
    tracer_of,
)
from mlserver_torch_stream.server.options import ServerOptions

_HEALTH = "/health"


def install(
    host: ServerHost,
    options: ServerOptions,
    metrics: TokenMetrics,
    weights: WeightsMetrics,
    sinks: RequestSinks,
) -> None:
    """Called once for a server."""
    settings = host.settings
    metrics.vllm_names = options.vllm_metric_names
    metrics.torchserve_names = options.torchserve_metric_names
    registry = partial(_registry, collectors=(metrics, weights))
    export_metrics(registry)
    routes = [Route(_HEALTH, partial(_health, host))]
    if settings.metrics_endpoint:
        routes.append(Route(settings.metrics_endpoint, partial(_scrape, settings, registry)))
    host.add_routes(routes)
    join_mlservers_log()
    structured = settings.use_structured_logging
    sinks.log = RequestLog(prompts=options.log_prompts, structured=structured) if options.log_requests else None
    sinks.tracer = tracer_of(settings)


def _registry(settings: Settings, collectors: Iterable[Collector]) -> CollectorRegistry:
    """MLServer's metrics and ours: with inference workers MLServer exports only the metrics in their files."""
    if not settings.parallel_workers:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    for collector in collectors:
        registry.register(collector)
    return registry


def _scrape(settings: Settings, registry: Callable[[Settings], CollectorRegistry], request: Request) -> Response:
    """No coroutine, so that starlette runs it in a thread."""
    return Response(generate_latest(registry(settings)), media_type=CONTENT_TYPE_LATEST)


async def _health(host: ServerHost, request: Request) -> Response:
    is_ready = bool(await host.data_plane.ready())
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)
