"""TorchServe's routes: predictions and explanations of handlers, KServe's V1 spelling of both, and ``/ping``.

Knows nothing of how a request is served. Paths of other runtimes' models are left to MLServer.
"""

from __future__ import annotations

from mlserver.registry import MultiModelRegistry
from mlserver.rest.server import RESTServer
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.lifecycle.readiness import is_ours
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.prediction_errors import as_json
from mlserver_torch_stream.server.rest.prediction_head import reply_headers, request_id_of
from mlserver_torch_stream.server.rest.predictions import PredictionEndpoint
from mlserver_torch_stream.server.rest.routes import all_models, find_model

# Path, whether it asks for an explanation, and the methods that the route matches; None: the endpoint refuses others.
_PATHS: tuple[tuple[str, bool, list[str] | None], ...] = (
    ("/predictions/{model_name}", False, None),
    ("/predictions/{model_name}/{model_version}", False, None),
    ("/explanations/{model_name}", True, None),
    ("/explanations/{model_name}/{model_version}", True, None),
    ("/v1/models/{model_name}:predict", False, ["POST"]),
    ("/v1/models/{model_name}:explain", True, ["POST"]),
)


def add_routes(server: RESTServer, options: ServerOptions, lifecycle: Lifecycle) -> None:
    """Called once for a server, when its first model of ours is registered."""
    data_plane = server._data_plane
    registry = data_plane._model_registry
    server._app.router.routes[:0] = [
        *(
            _PredictionRoute(path, PredictionEndpoint(data_plane, options, explain), methods, registry)
            for path, explain, methods in _PATHS
        ),
        Route("/ping", _Ping(registry, lifecycle).answer, methods=["GET"], name="torch_stream:/ping"),
    ]


class _PredictionRoute(Route):
    """Matches paths of our models, and of names that no model has."""

    def __init__(
        self, path: str, endpoint: PredictionEndpoint, methods: list[str] | None, registry: MultiModelRegistry
    ) -> None:
        super().__init__(path, endpoint, methods=methods, name=f"torch_stream:{path}")
        self._registry = registry

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL and self._is_ours(child["path_params"]["model_name"]):
            return match, child
        return Match.NONE, {}

    def _is_ours(self, name: str) -> bool:
        model = find_model(self._registry, name, None)
        return model is None or is_ours(model)


class _Ping:
    """The health of all models, in TorchServe's words; 503 where none is ready."""

    def __init__(self, registry: MultiModelRegistry, lifecycle: Lifecycle) -> None:
        self._registry = registry
        self._lifecycle = lifecycle

    async def answer(self, request: Request) -> Response:
        status = health_of(self._registry, self._lifecycle)
        response = Response(as_json({"status": status}), 503 if status == "Unhealthy" else 200)
        response.raw_headers += [
            (b"content-type", b"application/json"),
            *reply_headers(request_id_of(request.headers)),
        ]
        return response


def health_of(registry: MultiModelRegistry, lifecycle: Lifecycle) -> str:
    """In TorchServe's words."""
    ready = [bool(model.ready) for model in all_models(registry)]
    if lifecycle.shutdown_reason is not None or (ready and not any(ready)):
        return "Unhealthy"
    return "Healthy" if all(ready) else "Partial Healthy"
