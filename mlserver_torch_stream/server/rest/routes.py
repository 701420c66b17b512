"""Our routes on MLServer's app, before its own: for our models and for names that no model has.

Knows nothing of what happens behind them. A request for anybody else's model is not even matched here, so MLServer
serves it as if we were not there.
"""

from __future__ import annotations

from mlserver import MLModel
from mlserver.registry import MultiModelRegistry
from mlserver.rest.server import RESTServer
from starlette.routing import Match, Route
from starlette.types import Scope

from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.connection import NotesTransport
from mlserver_torch_stream.server.rest.endpoints import Endpoint

_MODELS = ("/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}")
_STREAMING = {"infer": False, "infer_stream": True, "generate": False, "generate_stream": True}


def install(server: RESTServer, options: ServerOptions) -> None:
    """Called once for a server, when its first model of ours is registered."""
    app, data_plane = server._app, server._data_plane
    registry = data_plane._model_registry
    routes = [
        _OurRoute(f"{models}/{door}", Endpoint(data_plane, options, streaming, door.startswith("generate")), registry)
        for models in _MODELS
        for door, streaming in _STREAMING.items()
    ]
    app.router.routes[:0] = routes
    if app.middleware_stack is None:
        app.middleware_stack = app.build_middleware_stack()
    app.middleware_stack = NotesTransport(app.middleware_stack)


def find_model(registry: MultiModelRegistry, name: str, version: str | None) -> MLModel | None:
    """What the registry's own ``get_model`` finds, without its coroutines: a route is matched in plain code."""
    versions = registry._models.get(name)
    return None if versions is None else versions._find_model(version)


class _OurRoute(Route):
    """Matches like any route of its path, but no other model's requests."""

    def __init__(self, path: str, door: Endpoint, registry: MultiModelRegistry) -> None:
        super().__init__(path, door, methods=["POST"], name=f"torch_stream:{path}")
        self._registry = registry

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL and self._is_ours(child["path_params"]):
            return match, child
        return Match.NONE, {}

    def _is_ours(self, path: dict[str, str]) -> bool:
        model = find_model(self._registry, path["model_name"], path.get("model_version"))
        return model is None or bool(getattr(model, "streams_tokens", False))
