"""TorchServe's routes: predictions and explanations, KServe's V1 spelling of both, ``/ping`` and descriptions.

Paths of other runtimes' models are left to MLServer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from mlserver.registry import MultiModelRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.torchserve_document import server_document
from mlserver_torch_stream.server.host import ServerHost, all_models, find_model
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute
from mlserver_torch_stream.server.rest.prediction_errors import as_json
from mlserver_torch_stream.server.rest.prediction_messages import reply_headers, request_id_of
from mlserver_torch_stream.server.rest.predictions import PredictionEndpoint, TokenPredictions


@dataclass(frozen=True)
class _Path:
    """``methods``: the methods that the route takes; with None the endpoint itself refuses wrong methods.

    ``legacy``: TorchServe has kept the path from its predecessor. There the parameters of the query are fields. If no
    model of ours has the name, the path may belong to another route.
    """

    path: str
    explain: bool = False
    methods: list[str] | None = None
    legacy: bool = False


_PATHS = (
    _Path("/predictions/{model_name}"),
    _Path("/predictions/{model_name}/{model_version}"),
    _Path("/predictions/{model_name}/{model_version}/{url_path:path}"),
    _Path("/explanations/{model_name}", explain=True),
    _Path("/explanations/{model_name}/{model_version}", explain=True),
    _Path("/explanations/{model_name}/{model_version}/{url_path:path}", explain=True),
    _Path("/v1/models/{model_name}:predict", methods=["POST"]),
    _Path("/v1/models/{model_name}:explain", explain=True, methods=["POST"]),
    _Path("/models/{model_name}/invoke", legacy=True),
    _Path("/{model_name}/predict", legacy=True),
    _Path("/{model_name}/{model_version}/predict", legacy=True),
)


def add_routes(host: ServerHost, lifecycle: Lifecycle, options: ServerOptions) -> None:
    """Called once for a server."""
    registry, tokens = host.registry, TokenPredictions(host, lifecycle, options)
    endpoint = partial(PredictionEndpoint, host, lifecycle, options, tokens)
    routes = [
        *(_PredictionRoute(each, endpoint(each.explain, each.legacy), registry) for each in _PATHS),
        Route("/ping", _Ping(registry, lifecycle).answer, methods=["GET"], name="torch_stream:/ping"),
        Route("/api-description", _describe, methods=["GET"], name="torch_stream:/api-description"),
        SelectiveRoute("/", _describe, ["OPTIONS"]),
    ]
    host.add_routes(routes)


class _PredictionRoute(SelectiveRoute):
    """Takes paths of our models, and of names that no model has, unless another route may have such a path."""

    def __init__(self, path: _Path, endpoint: PredictionEndpoint, registry: MultiModelRegistry) -> None:
        super().__init__(path.path, endpoint, path.methods)
        self._unknown = not path.legacy
        self._registry = registry

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        model = find_model(self._registry, path["model_name"], None)
        return self._unknown if model is None else is_ours(model)


async def _describe(request: Request) -> Response:
    return _torchserves(request, 200, server_document())


class _Ping:
    """The health of all models, in TorchServe's words; 503 where none is ready."""

    def __init__(self, registry: MultiModelRegistry, lifecycle: Lifecycle) -> None:
        self._registry = registry
        self._lifecycle = lifecycle

    async def answer(self, request: Request) -> Response:
        status = health_of(self._registry, self._lifecycle)
        return _torchserves(request, 503 if status == "Unhealthy" else 200, {"status": status})


def health_of(registry: MultiModelRegistry, lifecycle: Lifecycle) -> str:
    """In TorchServe's words."""
    ready = [bool(model.ready) for model in all_models(registry)]
    if lifecycle.shutdown_reason is not None or (ready and not any(ready)):
        return "Unhealthy"
    return "Healthy" if all(ready) else "Partial Healthy"


def _torchserves(request: Request, status: int, body: JsonObject) -> Response:
    response = Response(as_json(body), status)
    response.raw_headers += [(b"content-type", b"application/json"), *reply_headers(request_id_of(request.headers))]
    return response
