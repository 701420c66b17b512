"""For MLServer's metrics of the REST port, our faster code counts the same as its middleware."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from starlette_exporter import PrometheusMiddleware

from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute, _counting, pass_to_chosen

_ORIGINAL = getattr(PrometheusMiddleware.__call__, "__wrapped__", PrometheusMiddleware.__call__)


class _Counting(PrometheusMiddleware):
    __call__ = _counting(_ORIGINAL)


class _Original(PrometheusMiddleware):
    __call__ = _ORIGINAL


class _Answer:
    """Answers with the status in the path, raises at 500, and does not answer at 499."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = int(scope["path_params"]["status"])
        if status == 500:
            raise ValueError("as asked")
        if status != 499:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})


class _Models(SelectiveRoute):
    of_models = True

    def takes(self, scope: Scope, path: Any) -> bool:
        return bool(path["name"] != "foreign")


_PATHS = ("/models/a/200", "/models/b/200", "/models/a/404", "/models/a/500", "/models/a/499", "/models/foreign/200")
_OTHERS = ("/plain/201", "/other/202", "/nothing", "/health/200")


def _counted(kind: type[PrometheusMiddleware], prefix: str) -> dict[tuple[str, ...], float]:
    answer = _Answer()
    routes = [
        _Models("/models/{name}/{status}", answer, ["POST"]),
        SelectiveRoute("/other/{status}", answer),
        Route("/{kind}/{status}", answer),
        Route("/models/{name}/{status}", answer),
    ]
    app = Starlette(routes=routes)
    app.router.middleware_stack = pass_to_chosen(app.router.middleware_stack)
    app.add_middleware(kind, app_name="x", prefix=prefix, skip_paths=["/health/200"])
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def act() -> None:
        for method in ("POST", "GET"):
            for path in (*_PATHS, *_OTHERS):
                scope = {"type": "http", "method": method, "path": path, "root_path": "", "scheme": "http"}
                with suppress(ValueError):
                    await app({**scope, "headers": [], "query_string": b"", "server": ("h", 80)}, receive, send)

    asyncio.run(act())
    return {
        (sample.name.removeprefix(prefix), *map(str, sorted(sample.labels.items()))): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith(prefix) and not sample.name.endswith(("_sum", "_bucket", "_created"))
    }


def test_requests_are_counted_by_method_path_and_status_as_the_middleware_counts_them() -> None:
    ours = _counted(_Counting, "counted")
    assert ours == _counted(_Original, "original")
    assert ours["_requests_total", "('app_name', 'x')", "('method', 'POST')", "('path', '/models/{name}/{status}')",
                "('status_code', '200')"] == 3  # fmt: skip


def test_the_route_of_a_model_is_found_once() -> None:
    """The middleware alone matches its path at least twice."""
    asked = 0

    class Found(_Models):
        def takes(self, scope: Scope, path: Any) -> bool:
            nonlocal asked
            asked += 1
            return True

    app = Starlette(routes=[Found("/models/{name}/{status}", _Answer(), ["POST"])])
    app.router.middleware_stack = pass_to_chosen(app.router.middleware_stack)
    app.add_middleware(_Counting, app_name="x", prefix="once")
    _ask(app, "/models/a/200")
    assert asked == 1


def _ask(app: Starlette, path: str) -> list[Any]:
    """Posts a request of a browser, and returns the messages of the answer."""
    sent: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "scheme": "http"}

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"origin", b"http://page")]
    asyncio.run(app({**scope, "headers": headers, "query_string": b"", "server": ("h", 80)}, receive, send))
    return sent


def test_a_middleware_between_the_metrics_and_the_routes_still_changes_the_answer() -> None:
    app = Starlette(routes=[_Models("/models/{name}/{status}", _Answer(), ["POST"])])
    app.router.middleware_stack = pass_to_chosen(app.router.middleware_stack)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    app.add_middleware(_Counting, app_name="x", prefix="between")
    assert (b"access-control-allow-origin", b"*") in _ask(app, "/models/a/200")[0]["headers"]


def test_a_route_is_found_by_the_first_part_of_its_path_also_if_it_is_added_later() -> None:
    app = Starlette(routes=[_Models("/{kind}/{name}/{status}", _Answer(), ["POST"]), Route("/models", _Answer())])
    app.add_middleware(_Counting, app_name="x", prefix="later")
    app.router.middleware_stack = pass_to_chosen(app.router.middleware_stack)
    assert _ask(app, "/models/a/201")[0]["status"] == 201

    class Later(_Answer):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__({**scope, "path_params": {"status": "202"}}, receive, send)

    app.router.routes.insert(0, _Models("/models/{name}/{status}", Later(), ["POST"]))
    assert _ask(app, "/models/a/201")[0]["status"] == 202
    assert _ask(app, "/other/a/201")[0]["status"] == 201
