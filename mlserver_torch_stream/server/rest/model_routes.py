"""Adds Triton's REST routes that MLServer does not have: a model's configuration and statistics, and the index for
requests without a body.

Paths of other runtimes' models are left to MLServer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from mlserver.errors import MLServerError
from mlserver.handlers import ModelRepositoryHandlers
from mlserver.types import RepositoryIndexRequest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.server.host import ServerHost, find_model
from mlserver_torch_stream.server.model_info import read_config, read_statistics
from mlserver_torch_stream.server.request import as_refusal, is_ours
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute
from mlserver_torch_stream.server.state import ServerState

Read = Callable[[ServerHost, ServerState, str, str | None], Awaitable[JsonObject]]
_ALL_STATISTICS = "/v2/models/stats"


_PATHS: dict[str, Read] = {
    _ALL_STATISTICS: read_statistics,
    "/v2/models/{model_name}/stats": read_statistics,
    "/v2/models/{model_name}/versions/{model_version}/stats": read_statistics,
    "/v2/models/{model_name}/config": read_config,
    "/v2/models/{model_name}/versions/{model_version}/config": read_config,
}


def add_routes(host: ServerHost, state: ServerState) -> None:
    """Adds the routes. Called once for a server."""
    routes = [_ModelRoute(path, host, state, read) for path, read in _PATHS.items()]
    host.add_routes([*routes, _IndexRoute(host.repository_handlers)])


class _ModelRoute(SelectiveRoute):
    """Answers for models of this package, and for names that no model has."""

    def __init__(self, path: str, host: ServerHost, state: ServerState, read: Read) -> None:
        super().__init__(path, self._answer)
        self._host = host
        self._state = state
        self._read = read

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        name = path.get("model_name", "stats")  # a model may have the name "stats", which is the path of all statistics
        model = find_model(self._host.registry, name, path.get("model_version"))
        return model is None or ("model_name" in path and is_ours(model))

    async def _answer(self, request: Request) -> JSONResponse:
        path = request.path_params
        try:
            found = await self._read(self._host, self._state, path.get("model_name", ""), path.get("model_version"))
            return JSONResponse(found)
        except MLServerError as error:
            refusal = as_refusal(error, self._state.lifecycle.shutdown_reason)
            return JSONResponse({"error": refusal.message}, refusal.status)


class _IndexRoute(SelectiveRoute):
    """Returns the index of models for requests without a body, which MLServer's route refuses."""

    def __init__(self, handlers: ModelRepositoryHandlers) -> None:
        super().__init__("/v2/repository/index", self._answer, ["POST"])
        self._handlers = handlers

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        headers = Headers(scope=scope)
        return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def _answer(self, request: Request) -> JSONResponse:
        index = await self._handlers.index(RepositoryIndexRequest())
        return JSONResponse(index.model_dump(mode="json", exclude_none=True))
