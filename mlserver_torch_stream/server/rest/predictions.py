"""TorchServe's inference endpoint, and OpenAI's paths below ``/predictions/{model}``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from mlserver.logging import logger
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.protocol.torchserve_document import model_document
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_log import EndpointKind
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.body import ClientLeft, read_body
from mlserver_torch_stream.server.rest.connection import abort, break_off, notice_lag_early, watched
from mlserver_torch_stream.server.rest.endpoints import Endpoint
from mlserver_torch_stream.server.rest.openai_routes import openai_answer, shown_model
from mlserver_torch_stream.server.rest.prediction_errors import NoSuchPath, WrongMethod, as_json, status_and_body
from mlserver_torch_stream.server.rest.prediction_messages import (
    BodyField,
    PredictionPath,
    body_of,
    check_status,
    first_headers,
    read_fields,
    reply_headers,
    request_id_of,
    url_encoded,
)
from mlserver_torch_stream.server.rest.refusal import as_refusal, send_json, send_refusal, send_whole
from mlserver_torch_stream.server.rest.sse import ChunkStream
from mlserver_torch_stream.server.served_model import (
    Piece,
    PieceReply,
    ServedModel,
    TokenModel,
    find_accepted,
    is_ours,
    no_handler,
)

_MODELS = "v1/models"


class TokenPredictions:
    """Answers requests whose path names a model that generates tokens. The model that the body names is ignored."""

    def __init__(self, host: ServerHost, lifecycle: Lifecycle, options: ServerOptions) -> None:
        self._endpoints = {
            path.lstrip("/"): Endpoint(host, lifecycle, options, RestRoute(path, None, (spelling,)))
            for path, spelling in OPENAI_SPELLINGS.items()
        }

    async def serve(self, path: PredictionPath, model: TokenModel, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError."""
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
        return tuple(f"/predictions/{name}/{rest}" for rest in self._endpoints)


_METHODS = ("POST", "PUT")
_MODEL_PATHS = ("/predictions/{}", "/v1/models/{}:predict", "/v2/models/{}/infer")  # of a handler
_CLOSING_S = 60.0  # for a client to read what precedes the end of a broken stream


@dataclass(frozen=True)
class PredictionEndpoint:
    """The ASGI application of one path. ``explain``: the handler is asked for an explanation.

    ``takes_query``: the parameters of the query are fields, too.
    """

    host: ServerHost
    lifecycle: Lifecycle
    options: ServerOptions
    tokens: TokenPredictions
    explain: bool = False
    takes_query: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Prediction(self, scope, receive, send)
        try:
            await request.serve()
        except ClientLeft:
            pass
        except _BrokenStream as broken:
            logger.warning(f"A stream of model '{request.path.name}' breaks off: {log_text(broken.__cause__)}")
            await break_off(scope, receive, _CLOSING_S)
        except asyncio.CancelledError:
            if not request.left:
                raise
        except Exception as error:
            await request.refuse(error)


class _BrokenStream(Exception):
    """The handler has failed after its first piece."""


class _Prediction:
    """One request to the endpoint."""

    def __init__(self, endpoint: PredictionEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.path = PredictionPath.of(scope["path_params"], endpoint.host.registry)
        self.left = False
        self._headers = first_headers(scope)
        self._request_id = request_id_of(self._headers)
        self._endpoint = endpoint
        self._model: ServedModel | None = None
        self._opened = False
        self._scope = scope
        self._receive = receive
        self._send = send

    async def serve(self) -> None:
        method, path, endpoint = self._scope["method"], self.path, self._endpoint
        if method not in (*_METHODS, "OPTIONS") and not (method == "GET" and path.rest):
            raise WrongMethod
        model: ServedModel = find_accepted(endpoint.host.registry, path.name, path.version, is_ours)
        if method == "OPTIONS":
            await self._describe(model)
            return
        self._model = model
        if isinstance(model, TokenModel):
            asked = replace(path, rest="") if endpoint.explain else path  # there is nothing to explain
            await endpoint.tokens.serve(asked, model, self._scope, self._receive, self._send)
            return
        fields = await self._fields()
        async with endpoint.host.enter(path.name, path.version) as entered:
            reply = self._open(entered, fields)
            try:
                async with watched(self._receive, partial(self._leave, reply)), aclosing(reply.pieces()) as pieces:
                    await self._answer(reply, pieces)
            finally:
                reply.close()

    async def refuse(self, error: Exception) -> None:
        """Answers with an error, and records it unless the observer of an opened request has done so."""
        if self._model is not None and not self._opened:
            self._model.observers(EndpointKind.REST_STREAM).refused(self._request_id, error)
        refused = as_refusal(error, self._endpoint.lifecycle.shutdown_reason)
        status, body = status_and_body(refused)
        await send_refusal(self._send, status, body, refused.retry_after, reply_headers(self._request_id))

    async def _describe(self, model: ServedModel) -> None:
        """TorchServe's answer to OPTIONS: an OpenAPI document of the model's paths."""
        name = self.path.name
        handlers = tuple(path.format(name) for path in _MODEL_PATHS)
        paths = self._endpoint.tokens.paths(name) if isinstance(model, TokenModel) else handlers
        await send_json(self._send, 200, as_json(model_document(name, paths)), reply_headers(self._request_id))

    async def _fields(self) -> list[BodyField]:
        body = await read_body(self._scope, self._receive, self._endpoint.options.max_body_bytes)
        fields = await read_fields(body, self._headers.get("content-type", ""))
        return [*url_encoded(self._scope["query_string"]), *fields] if self._endpoint.takes_query else fields

    def _open(self, model: ServedModel, fields: Sequence[BodyField]) -> PieceReply:
        headers = {**self._headers, "url_path": self.path.rest, "explain": str(self._endpoint.explain)}
        reply = model.open_prediction(fields, headers, self._request_id, EndpointKind.REST_STREAM)
        self._opened = True
        return reply

    async def _answer(self, reply: PieceReply, pieces: AsyncGenerator[Piece, None]) -> None:
        """Raises an error only while nothing has been sent; later raises _BrokenStream."""
        first = await anext(pieces)
        check_status(first.status)
        headers = reply_headers(self._request_id, first.content_type, first.headers)
        if first.last:
            await send_whole(self._send, first.status, body_of(first.status, first.value), headers)
            await anext(pieces, None)  # there is none: the request has ended well
            return
        notice_lag_early(self._scope)
        headers.append((b"x-accel-buffering", b"no"))  # nginx would collect the chunks
        stalled_after = self._endpoint.options.stalled_reader_timeout
        stalled = partial(self._stalled, reply)
        chunks = ChunkStream(
            self._send, stalled_after=stalled_after, stalled=stalled, status=first.status, headers=headers
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
            raise _BrokenStream from as_refusal(error, self._endpoint.lifecycle.shutdown_reason)

    def _leave(self, reply: PieceReply) -> None:
        self.left = True
        reply.close()

    def _stalled(self, reply: PieceReply) -> None:
        seconds = self._endpoint.options.stalled_reader_timeout
        logger.warning(f"A client of model '{self.path.name}' has read nothing for {seconds:g} s: its stream is closed")
        self._leave(reply)
        abort(self._scope)
