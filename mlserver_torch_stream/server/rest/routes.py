"""Our routes on MLServer's app, before its own: for our models and for names that no model has.

A path that names another model does not match here, so MLServer serves it as if our routes did not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlserver.registry import MultiModelRegistry
from starlette.routing import Match, Route
from starlette.types import Scope

from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.host import ServerHost, find_model
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.connection import NotesTransport
from mlserver_torch_stream.server.rest.endpoints import Endpoint
from mlserver_torch_stream.server.rest.selective_route import SelectiveRoute
from mlserver_torch_stream.server.served_model import is_ours


def install(host: ServerHost) -> None:
    """Called once for a server."""
    host.put_outside(NotesTransport)


def add(host: ServerHost, lifecycle: Lifecycle, options: ServerOptions, rows: Sequence[RestRoute]) -> None:
    """Adds the rows whose paths the server does not have yet. Called for each model of this package."""
    known = {route.path for route in host.router.routes if isinstance(route, _OurRoute)}
    new = [row for row in rows if row.path not in known]
    host.add_routes([_OurRoute(row.path, Endpoint(host, lifecycle, options, row), host.registry) for row in new])


class _OurRoute(SelectiveRoute):
    """Matches like any route of its path, but no path that names another runtime's model."""

    def __init__(self, path: str, endpoint: Endpoint, registry: MultiModelRegistry) -> None:
        super().__init__(path, endpoint, ["POST"])
        self._registry = registry

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """A path without a model's name belongs to this package alone, which answers other methods with 405."""
        return super().matches(scope) if "model_name" in self.param_convertors else Route.matches(self, scope)

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        model = find_model(self._registry, path["model_name"], path.get("model_version"))
        return model is None or is_ours(model)
