"""Liveness and readiness as JSON, which KServe's client reads: MLServer's own answers have a status and no body.

Knows nothing of why something is not ready: ``readiness`` answers before these routes do, where it has a reason.
"""

from __future__ import annotations

from mlserver.handlers import DataPlane
from mlserver.rest.server import RESTServer
from mlserver.rest.utils import to_status_code
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import Scope

from mlserver_torch_stream.server.life.readiness import is_ours
from mlserver_torch_stream.server.rest.routes import find_model

_MODELS = ("/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}")


def add_routes(server: RESTServer) -> None:
    """Puts them before MLServer's own."""
    health = _Health(server._data_plane)
    server._app.router.routes[:0] = [
        Route("/v2/health/live", health.live),
        Route("/v2/health/ready", health.ready),
        *(_OurModelsRoute(f"{model}/ready", server._data_plane) for model in _MODELS),
    ]


class _Health:
    def __init__(self, data_plane: DataPlane) -> None:
        self._data_plane = data_plane

    async def live(self, request: Request) -> JSONResponse:
        live = await self._data_plane.live()
        return JSONResponse({"live": live}, to_status_code(live))

    async def ready(self, request: Request) -> JSONResponse:
        ready = await self._data_plane.ready()
        return JSONResponse({"ready": ready}, to_status_code(ready))


class _OurModelsRoute(Route):
    """Matches models of ours only; they are ready, or ``readiness`` would have answered."""

    def __init__(self, path: str, data_plane: DataPlane) -> None:
        super().__init__(path, self._ready)
        self._registry = data_plane._model_registry

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL:
            path = child["path_params"]
            model = find_model(self._registry, path["model_name"], path.get("model_version"))
            if model is not None and is_ours(model):
                return match, child
        return Match.NONE, {}

    @staticmethod
    async def _ready(request: Request) -> JSONResponse:
        return JSONResponse({"name": request.path_params["model_name"], "ready": True})
