"""Telemetry on MLServer's own app, without a server process; telemetry that is switched off does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
from mlserver.settings import Settings
from starlette.applications import Starlette

from mlserver_torch_stream.engine.shared_pool import PROCESS, ProcessResources
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.observability.metrics import EngineMetrics, TokenMetrics, WeightsMetrics, install
from mlserver_torch_stream.server.observability.request_observer import RequestMetrics, RequestSinks
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.state import server_state


def _install(ready: bool = True, sinks: RequestSinks | None = None, **options: Any) -> Callable[[str], httpx.Response]:
    """Returns a function that returns the app's answer to a GET of a path."""

    async def is_ready() -> bool:
        return ready

    server_state()  # registers the metrics of the process
    settings = Settings(parallel_workers=0, metrics_endpoint=options.pop("metrics_endpoint", "/metrics"))
    app = Starlette()
    server = SimpleNamespace(_settings=settings, _app=app, _data_plane=SimpleNamespace(ready=is_ready))
    metrics, weights = TokenMetrics(EngineMetrics(), RequestMetrics()), WeightsMetrics(PROCESS)
    install(ServerHost(server), ServerOptions(**options), metrics, weights, sinks or RequestSinks())

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as asking:
            return await asking.get(path)

    return lambda path: asyncio.run(get(path))


def test_metrics_are_where_mlserver_has_them_or_nowhere() -> None:
    assert "torch_stream_loaded_models" in _install()("/metrics").text
    assert _install(metrics_endpoint="/prom")("/prom").status_code == 200
    assert _install(metrics_endpoint=None)("/metrics").status_code == 404


def test_loads_that_are_checked_again_are_counted_by_reason() -> None:
    resources = ProcessResources()
    resources.checks["chip"] += 2
    (checks,) = (each for each in WeightsMetrics(resources).collect() if each.name == "torch_stream_weight_checks")
    assert [(each.name, each.labels, each.value) for each in checks.samples] == [
        ("torch_stream_weight_checks_total", {"reason": "chip"}, 2)
    ]


def test_a_server_that_is_not_ready_is_unhealthy() -> None:
    assert _install(ready=False)("/health").status_code == 503


def test_log_and_trace_are_off_when_asked() -> None:
    sinks = RequestSinks()
    _install(sinks=sinks, log_requests=False)
    assert sinks == RequestSinks(log=None, start_span=None)


def test_prompts_are_logged_when_asked() -> None:
    sinks = RequestSinks()
    _install(sinks=sinks, log_prompts=True)
    assert sinks.log is not None and sinks.log.prompts
