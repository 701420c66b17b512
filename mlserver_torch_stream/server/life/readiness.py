"""Readiness that tells the truth, and who may enter: our models answer for themselves where MLServer would say 400.

Knows nothing of why a model is not ready. Other models' readiness and requests stay MLServer's own.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from mlserver import MLModel
from mlserver.context import model_context
from mlserver.handlers import DataPlane
from mlserver.rest.server import RESTServer
from mlserver.rest.utils import to_status_code
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.server.life.lifecycle import LIFECYCLE
from mlserver_torch_stream.server.rest.routes import find_model

_MARK = "_torch_stream_readiness"
_NAME = "torch_stream:ready"
_PATHS = (
    "/v2/health/ready",
    "/v2/models/{model_name}/ready",
    "/v2/models/{model_name}/versions/{model_version}/ready",
)


def install() -> None:
    """Lets requests to our models in whether they are ready or not: they refuse with a status of their own. Idempotent.

    MLServer refuses with 400, at which Seldon Core 2 loads the model anew; and it knows no model that still takes
    requests but wants no new ones to be routed to it. A process that is to end is not ready, whatever models it has.
    """
    original = DataPlane._infer_contextmanager
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    @asynccontextmanager
    async def enter(data_plane: DataPlane, name: str, version: str | None = None) -> AsyncIterator[MLModel]:
        model = find_model(data_plane._model_registry, name, version)
        if model is None or not is_ours(model):
            async with original(data_plane, name, version) as model:
                yield model
            return
        labels = {"model": name, "version": version}
        seconds = data_plane._ModelInferRequestDuration.labels(**labels).time()
        failures = data_plane._ModelInferRequestFailure.labels(**labels).count_exceptions()
        with seconds, failures, model.visits.one():
            with model_context(model.settings):
                yield model
            data_plane._ModelInferRequestSuccess.labels(**labels).inc()

    setattr(enter, _MARK, True)
    DataPlane._infer_contextmanager = enter
    DataPlane.ready = _unless_leaving(DataPlane.ready)


def _unless_leaving(ready: Callable[[DataPlane], Awaitable[bool]]) -> Callable[[DataPlane], Awaitable[bool]]:
    @functools.wraps(ready)
    async def is_ready(data_plane: DataPlane) -> bool:
        return LIFECYCLE.leaving is None and await ready(data_plane)

    return is_ready


def add_routes(server: RESTServer) -> None:
    """Puts our routes for readiness before MLServer's. Idempotent."""
    routes = server._app.router.routes
    if not any(getattr(route, "name", None) == _NAME for route in routes):
        routes[:0] = [_ReadyRoute(path, server._data_plane) for path in _PATHS]


def is_ours(model: MLModel) -> bool:
    return bool(getattr(model, "streams_tokens", False))


class _ReadyRoute(Route):
    """Answers for the whole server, and for models of ours; MLServer's own route answers for other models."""

    def __init__(self, path: str, data_plane: DataPlane) -> None:
        super().__init__(path, self._answer, name=_NAME)
        self._data_plane = data_plane

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL:
            path = child["path_params"]
            if "model_name" not in path or any(map(is_ours, self._asked(path))):
                return match, child
        return Match.NONE, {}

    async def _answer(self, request: Request) -> Response:
        """What MLServer says, unless one of ours has a trouble by then: one that comes meanwhile makes no 400."""
        path = request.path_params
        if "model_name" in path:
            ready = await self._data_plane.model_ready(path["model_name"], path.get("model_version"))
        else:
            ready = await self._data_plane.ready()
        trouble = self._trouble(path)
        if trouble is None:
            return Response(status_code=to_status_code(ready))
        headers = {"retry-after": str(NotServing.retry_after)}
        return JSONResponse({"error": trouble}, NotServing.status, headers)

    def _trouble(self, path: dict[str, str]) -> str | None:
        if "model_name" not in path and LIFECYCLE.leaving is not None:
            return LIFECYCLE.leaving
        ours = filter(is_ours, self._asked(path))
        return next((f"model '{model.name}': {model.trouble}" for model in ours if model.trouble), None)

    def _asked(self, path: dict[str, str]) -> list[MLModel]:
        if "model_name" not in path:
            return _all_models(self._data_plane)
        model = find_model(self._data_plane._model_registry, path["model_name"], path.get("model_version"))
        return [] if model is None else [model]


def _all_models(data_plane: DataPlane) -> list[MLModel]:
    found: list[MLModel] = []
    for versions in data_plane._model_registry._models.values():
        found += versions._versions.values()
        if versions.default is not None and not versions.default.version:
            found.append(versions.default)
    return found
