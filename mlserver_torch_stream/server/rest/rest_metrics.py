"""Counts the requests to paths of models in MLServer's metrics of the REST port, ``rest_server_*``, with less work.

MLServer's middleware builds the URL of each request and compares the routes' paths a second time to find the label
``path``, which takes longer than many an answer. Here the route is found once, before the request is passed on, and
the router does not compare the paths again. Requests to other paths are left to the middleware and the router.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlserver_torch_stream.server.host import Hook, wrap
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute

_Call = Callable[[Any, Scope, Receive, Send], Awaitable[None]]
_CHOSEN = "mlserver_torch_stream.route"  # in a scope: the route of the request, and what the route adds to the scope
_DISCONNECTED, _FAILED = 499, 500  # statuses of requests without an answer


def install() -> None:
    """Patches MLServer's middleware. Called once."""
    wrap(Hook.REST_METRICS, _counting)


def pass_to_chosen(router: ASGIApp) -> ASGIApp:
    """Returns an app that passes a request to the route that was found for it, and other requests to the router."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        chosen = scope.get(_CHOSEN)
        if chosen is None:
            await router(scope, receive, send)
            return
        route, child = chosen
        scope.update(child)
        await route.handle(scope, receive, send)

    return call


def _counting(original: _Call) -> _Call:
    async def call(middleware: Any, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = _choose(scope) if scope["type"] == "http" and not scope.get("root_path") else None
        if chosen is None:
            await original(middleware, scope, receive, send)
            return
        scope[_CHOSEN] = chosen
        await _counted(middleware, chosen[0].path, scope, receive, send)

    return call


def _choose(scope: Scope) -> tuple[SelectiveRoute, Scope] | None:
    """Returns the route that takes the request, and what it adds to the scope; None if the path is not of a model."""
    path: str = scope["path"]
    for route in scope["app"].router.routes:
        if path.startswith(_prefix(route.path)):
            match, child = route.matches(scope)
            if match is Match.FULL:
                return (route, child) if isinstance(route, SelectiveRoute) and route.of_models else None
    return None


@functools.lru_cache(maxsize=1024)
def _prefix(path: str) -> str:
    """Returns the fixed beginning of a route's path."""
    return path.partition("{")[0]


async def _counted(middleware: Any, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    status: int | None = None
    ended: float | None = None

    async def noting(message: Message) -> None:
        nonlocal status, ended
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            ended = time.perf_counter()
        await send(message)

    method = scope["method"]
    in_progress = _in_progress(middleware, method)
    in_progress.inc()
    began = time.perf_counter()
    failed: Exception | None = None
    try:
        await middleware.app(scope, receive, noting)
    except Exception as error:
        status, failed = _FAILED, error
    finally:
        in_progress.dec()
    if status is None:
        status = _DISCONNECTED if await Request(scope, receive).is_disconnected() else _FAILED
    count, seconds = _metrics(middleware, method, path, status)
    count.inc()
    seconds.observe((ended or time.perf_counter()) - began)
    if failed is not None:
        raise failed


@functools.lru_cache(maxsize=64)
def _in_progress(middleware: Any, method: str) -> Any:
    return middleware.requests_in_progress.labels(method, middleware.app_name)


@functools.lru_cache(maxsize=1024)
def _metrics(middleware: Any, method: str, path: str, status: int) -> tuple[Any, Any]:
    labels = method, path, status, middleware.app_name
    return middleware.request_count.labels(*labels), middleware.request_time.labels(*labels)
