"""Shows what is noticed: metrics and a simple health check on the REST port too, the log's lines, the trace.

Knows nothing of requests. Called when MLServer registers a model of ours, the only moment when its settings are seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mlserver.metrics.prometheus import PrometheusEndpoint
from mlserver.rest.server import RESTServer
from mlserver.settings import Settings
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlserver_torch_stream.server.observability.metrics import METRICS
from mlserver_torch_stream.server.observability.request_log import RequestLog, join_mlservers_log
from mlserver_torch_stream.server.observability.request_observer import SINKS
from mlserver_torch_stream.server.observability.tracing import tracer_of
from mlserver_torch_stream.server.options import ServerOptions

_HEALTH = "/health"


def install(server: RESTServer, options: ServerOptions) -> None:
    """Called once for a server."""
    settings = server._settings
    METRICS.vllm_names = options.vllm_metric_names
    PrometheusEndpoint._registry = property(lambda endpoint: _registry(endpoint._settings))
    routes = [Route(_HEALTH, _health(server))]
    if settings.metrics_endpoint:
        routes.append(Route(settings.metrics_endpoint, _metrics(settings)))
    server._app.router.routes[:0] = routes
    join_mlservers_log()
    structured = settings.use_structured_logging
    SINKS.log = RequestLog(prompts=options.log_prompts, structured=structured) if options.log_requests else None
    SINKS.tracer = tracer_of(settings)


def _registry(settings: Settings) -> CollectorRegistry:
    """What MLServer shows, and ours: with inference workers it shows only what they write to files."""
    if not settings.parallel_workers:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(METRICS)
    return registry


def _metrics(settings: Settings) -> Callable[[Request], Response]:
    def metrics(request: Request) -> Response:  # no coroutine: starlette runs it in a thread
        return Response(generate_latest(_registry(settings)), media_type=CONTENT_TYPE_LATEST)

    return metrics


def _health(server: RESTServer) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        is_ready = bool(await server._data_plane.ready())
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    return health
