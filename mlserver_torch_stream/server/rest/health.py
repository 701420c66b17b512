"""Liveness and readiness: patches MLServer's answers, and puts our routes before MLServer's.

Our routes answer in JSON, which KServe's client expects. If a model is not ready, they answer 503 with the reason. For
other runtimes' models MLServer's routes answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from mlserver import MLModel
from mlserver.handlers import DataPlane
from mlserver.rest.utils import to_status_code
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.server.host import Hook, ServerHost, all_models, find_model, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute

HealthCheck = Callable[[DataPlane], Awaitable[bool]]
_LIVE = "/v2/health/live"
_PATHS = (
    _LIVE,
    "/v2/health/ready",
    "/v2/models/{model_name}/ready",
    "/v2/models/{model_name}/versions/{model_version}/ready",
)


def install(lifecycle: Lifecycle) -> None:
    """Patches MLServer's answers. Called once.

    During a shutdown the process is not ready, even if its models are. If the process shuts down because an engine
    died, it is not live either, so that it is restarted even if the shutdown hangs.
    """
    wrap(Hook.READY, partial(_unless, lambda: lifecycle.shutdown_reason))
    wrap(Hook.LIVE, partial(_unless, lambda: lifecycle.failure))


def _unless(trouble: Callable[[], str | None], check: HealthCheck) -> HealthCheck:
    async def checked(data_plane: DataPlane) -> bool:
        return trouble() is None and await check(data_plane)

    return checked


def add_routes(host: ServerHost, lifecycle: Lifecycle) -> None:
    """Puts our routes for health before MLServer's. Called once for a server."""
    host.add_routes([_HealthRoute(path, host, lifecycle) for path in _PATHS])


class _HealthRoute(SelectiveRoute):
    """Answers for the whole server and for models of this package; MLServer's own route answers for other models."""

    def __init__(self, path: str, host: ServerHost, lifecycle: Lifecycle) -> None:
        super().__init__(path, self._answer)
        self._host = host
        self._lifecycle = lifecycle

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        """During a shutdown the route also accepts unknown names, because the registry forgets a model whose load is
        interrupted.
        """
        if "model_name" not in path:
            return True
        models = self._models(path)
        return any(map(is_ours, models)) or (not models and self._lifecycle.shutdown_reason is not None)

    async def _answer(self, request: Request) -> JSONResponse:
        """Returns MLServer's answer. If a model is not ready before or after MLServer is asked, returns 503 with the
        reason.
        """
        path = request.path_params
        trouble = self._trouble(path)
        healthy = trouble is None and await self._ask_mlserver(path)
        trouble = trouble or self._trouble(path)
        if trouble is not None:
            headers = {"retry-after": str(NotServing.retry_after)}
            return JSONResponse({"error": trouble}, NotServing.status, headers)
        name = {"name": path["model_name"]} if "model_name" in path else {}
        return JSONResponse({**name, "live" if self.path == _LIVE else "ready": healthy}, to_status_code(healthy))

    async def _ask_mlserver(self, path: Mapping[str, str]) -> bool:
        if self.path == _LIVE:
            return bool(await self._host.data_plane.live())
        if "model_name" in path:
            return bool(await self._host.data_plane.model_ready(path["model_name"], path.get("model_version")))
        return bool(await self._host.data_plane.ready())

    def _trouble(self, path: Mapping[str, str]) -> str | None:
        if self.path == _LIVE:
            return self._lifecycle.failure
        if self._lifecycle.shutdown_reason is not None and ("model_name" not in path or not self._models(path)):
            return self._lifecycle.shutdown_reason
        ours = filter(is_ours, self._models(path))
        return next((f"model '{model.name}': {model.trouble}" for model in ours if model.trouble), None)

    def _models(self, path: Mapping[str, str]) -> list[MLModel]:
        if "model_name" not in path:
            return all_models(self._host.registry)
        model = find_model(self._host.registry, path["model_name"], path.get("model_version"))
        return [] if model is None else [model]
