"""Our routes on MLServer's app, before its own: for our models and for names that no model has.

Knows nothing of how a request is served. A path that names another model does not match here, so MLServer serves it as
if our routes did not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlserver import MLModel
from mlserver.registry import MultiModelRegistry
from mlserver.rest.server import RESTServer
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.connection import NotesTransport
from mlserver_torch_stream.server.rest.endpoints import Endpoint


def install(server: RESTServer) -> None:
    """Called once for a server."""
    app = server._app
    if app.middleware_stack is None:
        app.middleware_stack = app.build_middleware_stack()
    app.middleware_stack = NotesTransport(app.middleware_stack)


def add(server: RESTServer, options: ServerOptions, rows: Sequence[RestRoute]) -> None:
    """Adds the rows whose paths the server does not have yet. Called for each model of this package."""
    router, data_plane = server._app.router, server._data_plane
    known = {route.path for route in router.routes if isinstance(route, _OurRoute)}
    router.routes[:0] = [
        _OurRoute(row.path, Endpoint(data_plane, options, row), data_plane._model_registry)
        for row in rows
        if row.path not in known
    ]


def find_model(registry: MultiModelRegistry, name: str, version: str | None) -> MLModel | None:
    """The model that the registry's own ``get_model`` finds, but synchronously, as routes are matched."""
    versions = registry._models.get(name)
    return None if versions is None else versions._find_model(version)


def all_models(registry: MultiModelRegistry) -> list[MLModel]:
    """Every version of every model."""
    found: list[MLModel] = []
    for versions in registry._models.values():
        found += versions._versions.values()
        if versions.default is not None and not versions.default.version:
            found.append(versions.default)
    return found


class PrefixedRoute(Route):
    """Looks at the beginning of a path before its pattern: with all its routes a server has dozens of patterns."""

    def __init__(self, path: str, endpoint: ASGIApp, methods: list[str] | None) -> None:
        super().__init__(path, endpoint, methods=methods, name=f"torch_stream:{path}")
        self._prefix = path.partition("{")[0]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["path"].startswith(self._prefix) or scope.get("root_path"):
            return super().matches(scope)
        return Match.NONE, {}


class _OurRoute(PrefixedRoute):
    """Matches like any route of its path, but no path that names another's model."""

    def __init__(self, path: str, endpoint: Endpoint, registry: MultiModelRegistry) -> None:
        super().__init__(path, endpoint, ["POST"])
        self._registry = registry

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """A path that is ours whatever its model answers 405 to another method; others leave that to MLServer."""
        match, child = super().matches(scope)
        if "model_name" not in self.param_convertors or (match is Match.FULL and self._is_ours(child["path_params"])):
            return match, child
        return Match.NONE, {}

    def _is_ours(self, path: dict[str, str]) -> bool:
        model = find_model(self._registry, path["model_name"], path.get("model_version"))
        return model is None or bool(getattr(model, "streams_tokens", False))
