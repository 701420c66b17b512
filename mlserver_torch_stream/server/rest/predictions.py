"""Serves TorchServe's inference paths, OpenAI's paths below ``/predictions/{model}``, and TorchServe's health check and
API description.

Paths of other runtimes' models are left to MLServer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.protocol.torchserve_document import model_document, server_document
from mlserver_torch_stream.server.host import ServerHost, all_models, find_model
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import Piece, PieceReply, ServedModel, find_accepted, is_ours, no_handler
from mlserver_torch_stream.server.rest.connection import (
    break_off,
    notice_lag_early,
    send_json,
    send_refusal,
    send_whole,
)
from mlserver_torch_stream.server.rest.direct_predictions import BEGUN, BegunPrediction
from mlserver_torch_stream.server.rest.endpoints import Endpoint, HttpRequest, Reported, SelectiveRoute
from mlserver_torch_stream.server.rest.openai_routes import openai_answer, shown_model
from mlserver_torch_stream.server.rest.prediction_messages import (
    WITHOUT_BODY,
    BodyField,
    NoSuchPath,
    PredictionPath,
    WrongMethod,
    as_json,
    body_of,
    check_status,
    first_headers,
    handler_headers,
    read_fields,
    reply_headers,
    request_id_of,
    status_and_body,
    url_encoded,
)
from mlserver_torch_stream.server.rest.sse import ChunkStream
from mlserver_torch_stream.server.token_model import TokenModel

_MODELS = "v1/models"


class TokenPredictions:
    """Answers requests whose path names a model that generates tokens. The name in the body is ignored."""

    def __init__(self, host: ServerHost, lifecycle: Lifecycle, options: ServerOptions) -> None:
        self._endpoints = {
            path.lstrip("/"): Endpoint(host, lifecycle, options, RestRoute(path, None, (spelling,)))
            for path, spelling in OPENAI_SPELLINGS.items()
        }

    async def serve(self, path: PredictionPath, model: TokenModel, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request with the endpoint of OpenAI's API that its path names. Raises RequestError."""
        endpoint = self._endpoints.get(path.rest)
        if path.rest == _MODELS:
            shown = {"object": "list", "data": [shown_model(model)]}
            await openai_answer(Request(scope), 200, shown)(scope, receive, send)
        elif endpoint is not None and scope["method"] == "GET":
            raise WrongMethod
        elif endpoint is not None:
            named = {"model_name": path.name, "model_version": path.version}
            await endpoint({**scope, "path_params": named}, receive, send)
        elif path.rest:
            raise NoSuchPath(path.rest, self.paths(path.name))
        else:
            raise no_handler(path.name, self.paths(path.name)[0])

    def paths(self, name: str) -> tuple[str, ...]:
        """Returns the paths below ``/predictions`` at which the model ``name`` answers."""
        return tuple(f"/predictions/{name}/{rest}" for rest in self._endpoints)


_METHODS = ("POST", "PUT")
_MODEL_PATHS = ("/predictions/{}", "/v1/models/{}:predict", "/v2/models/{}/infer")  # the paths of a handler
_CLOSING_S = 60.0  # seconds that a client has to read the rest of a broken stream


@dataclass(frozen=True)
class PredictionEndpoint:
    """The ASGI application of one path. With ``explain`` the handler is asked for an explanation.

    With ``takes_query`` the parameters of the URL's query become fields of the request.
    """

    host: ServerHost
    lifecycle: Lifecycle
    options: ServerOptions
    tokens: TokenPredictions
    explain: bool = False
    takes_query: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Prediction(self, scope, receive, send).answer()


class _Prediction(HttpRequest[PieceReply]):
    """One request to the endpoint."""

    def __init__(self, endpoint: PredictionEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(endpoint, scope, receive, send, EndpointKind.REST_STREAM)
        self._path = PredictionPath.of(scope["path_params"], endpoint.host.registry)
        self._headers = first_headers(scope)
        self.request_id = request_id_of(self._headers)
        self._endpoint = endpoint

    async def serve(self) -> None:
        begun: BegunPrediction | None = self._scope.get(BEGUN)
        if begun is not None:
            self.model, self.version, self.request_id = begun.model, begun.version, begun.request_id
            async with self.entered(self._host, begun.entered):
                await self._read(begun.reply)
            return
        method, path, endpoint = self._scope["method"], self._path, self._endpoint
        if method not in (*_METHODS, "OPTIONS") and not (method == "GET" and path.rest):
            raise WrongMethod
        model: ServedModel = find_accepted(self._host.registry, path.name, path.version, is_ours)
        if method == "OPTIONS":
            await self._describe(model)
            return
        self.model, self.version = model, path.version
        if isinstance(model, TokenModel):
            asked = replace(path, rest="") if endpoint.explain else path  # a token model has no explanations
            await endpoint.tokens.serve(asked, model, self._scope, self._receive, self._send)
            return
        fields = await self._fields()
        headers = handler_headers(self._headers, path.rest, endpoint.explain)
        async with self.entered(self._host) as model:
            await self._read(model.open_prediction(fields, headers, self.request_id, self.kind))

    async def send_error(self, error: RequestError) -> None:
        status, body = status_and_body(error)
        await send_refusal(self._send, status, body, error.retry_after, reply_headers(self.request_id))

    async def end_failed(self, why: str) -> None:
        logger.warning(f"A stream of model '{self.name}' breaks off: {why}")
        await break_off(self._scope, self._receive, _CLOSING_S)

    async def _describe(self, model: ServedModel) -> None:
        """Answers OPTIONS as TorchServe does, with an OpenAPI document of the model's paths."""
        name = self._path.name
        handlers = tuple(path.format(name) for path in _MODEL_PATHS)
        paths = self._endpoint.tokens.paths(name) if isinstance(model, TokenModel) else handlers
        await send_json(self._send, 200, as_json(model_document(name, paths)), reply_headers(self.request_id))

    async def _fields(self) -> list[BodyField]:
        fields = await read_fields(await self.body(), self._headers.get("content-type", ""))
        return [*url_encoded(self._scope["query_string"]), *fields] if self._endpoint.takes_query else fields

    async def _read(self, reply: PieceReply) -> None:
        self.reply = reply
        async with self.watched(), aclosing(reply.pieces()) as pieces:
            await self._answer(pieces)

    async def _answer(self, pieces: AsyncGenerator[Piece, None]) -> None:
        first = await anext(pieces)
        check_status(first.status)
        headers = reply_headers(self.request_id, first.content_type, first.headers)
        if first.last:
            await send_whole(self._send, first.status, body_of(first.status, first.value), headers)
            await anext(pieces, None)  # ends the iteration, so that the request counts as successful
            return
        if first.status in WITHOUT_BODY:
            async for _ in pieces:  # which the response has no place for
                pass
            await send_whole(self._send, first.status, b"", headers)
            return
        notice_lag_early(self._scope)
        headers.append((b"x-accel-buffering", b"no"))  # otherwise nginx buffers the chunks
        stalled_after, status = self._options.stalled_reader_timeout, first.status
        chunks = ChunkStream(
            self._send, stalled_after=stalled_after, stalled=self.give_up, status=status, headers=headers
        )
        async with chunks:
            await chunks.write(first.value)
            await self._send_rest(pieces, chunks)
            await chunks.write(b"", more=False)

    async def _send_rest(self, pieces: AsyncGenerator[Piece, None], chunks: ChunkStream) -> None:
        try:
            async for piece in pieces:
                await chunks.write(piece.value)
        except Exception as error:
            raise Reported from self.refuse(error)


@dataclass(frozen=True)
class _Path:
    """One of TorchServe's paths. The route accepts ``methods``. If that is None, it accepts all methods, and the
    endpoint refuses the wrong ones.

    TorchServe kept ``legacy`` paths from its predecessor; for them the parameters of the query are fields. If such a
    path does not name a model of ours, it may belong to another route.
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
    """Adds TorchServe's paths. Called once for a server."""
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
    """Accepts paths that name our models, and paths with unknown names unless another route might match them."""

    of_models = True

    def __init__(self, path: _Path, endpoint: PredictionEndpoint, registry: MultiModelRegistry) -> None:
        super().__init__(path.path, endpoint, path.methods)
        self._unknown = not path.legacy
        self._registry = registry

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        name = path["model_name"]
        model = find_model(self._registry, name, path.get("model_version"))
        if model is None:  # versions may be of different runtimes; if the version is unknown, the default one decides
            model = find_model(self._registry, name, None)
        return self._unknown if model is None else is_ours(model)


async def _describe(request: Request) -> Response:
    return _torchserves(request, 200, server_document())


class _Ping:
    """Returns the health of all models, in TorchServe's terms, with status 503 if none is ready."""

    def __init__(self, registry: MultiModelRegistry, lifecycle: Lifecycle) -> None:
        self._registry = registry
        self._lifecycle = lifecycle

    async def answer(self, request: Request) -> Response:
        status = health_of(self._registry, self._lifecycle)
        return _torchserves(request, 503 if status == "Unhealthy" else 200, {"status": status})


def health_of(registry: MultiModelRegistry, lifecycle: Lifecycle) -> str:
    """Returns the health of all models as ``Healthy``, ``Partial Healthy`` or ``Unhealthy``, as TorchServe does."""
    ready = [bool(model.ready) for model in all_models(registry)]
    if lifecycle.shutdown_reason is not None or (ready and not any(ready)):
        return "Unhealthy"
    return "Healthy" if all(ready) else "Partial Healthy"


def _torchserves(request: Request, status: int, body: JsonObject) -> Response:
    response = Response(as_json(body), status)
    response.raw_headers += [(b"content-type", b"application/json"), *reply_headers(request_id_of(request.headers))]
    return response
