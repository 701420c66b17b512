"""The REST endpoints of our models: one request in, one JSON reply or one stream of events out.

It serves requests for our models and for unknown ones only. MLServer's own counters and CloudEvents headers are those
of its data plane, as for any model; its response cache is not asked, as a sampled reply is never the same twice.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import orjson
from mlserver.errors import ModelNotFound
from mlserver.logging import logger
from mlserver.types import InferenceResponse
from mlserver.utils import extract_headers
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_log import EndpointKind, ignored_parameters
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.body import JSON_LENGTH, ClientLeft, parse_object, read_body, split_binary
from mlserver_torch_stream.server.rest.connection import abort, notice_lag_early, watched
from mlserver_torch_stream.server.rest.refusal import EncodedHeaders, as_refusal, send_json, send_refusal, send_whole
from mlserver_torch_stream.server.rest.sse import EventStream
from mlserver_torch_stream.server.served_model import (
    EndpointReply,
    RestRequest,
    ServedModel,
    TokenModel,
    is_ours,
    name_of_alias,
    only_model,
)
from mlserver_torch_stream.server.status import as_headers

_IGNORED_HEADER = b"x-ignored-parameters"
_LARGE_BYTES = 2**14  # a schema of that many can take 20 ms to decode


@dataclass(frozen=True)
class Endpoint:
    """The ASGI application of one row of the table."""

    host: ServerHost
    lifecycle: Lifecycle
    options: ServerOptions
    route: RestRoute
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)  # held while a large body is decoded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _EndpointRequest(self, scope, receive, send)
        try:
            await request.serve()
        except ClientLeft:
            pass
        except _AlreadyReported as reported:
            logger.warning(f"A stream of model '{request.name}' failed: {log_text(reported.__cause__)}")
        except asyncio.CancelledError:
            if not request.left:
                raise
        except Exception as error:
            request.end_decoding()
            await request.refuse(error)
        finally:
            request.end_decoding()


class _AlreadyReported(Exception):
    """The stream has reported the error to the client; this is raised so that MLServer counts a failure."""


class _EndpointRequest:
    """One request to an endpoint."""

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        route = endpoint.route
        self.name = ""
        self.left = False
        self._version: str | None = None
        self._model: ServedModel | None = None
        self._spelling = route.spellings[0]  # until the body is read, its errors are written in the first one
        self._streaming = bool(route.streaming)
        self._request_id = ""
        self._opened = False
        self._ignored: list[str] = []  # names of unknown parameters
        self._decoding_since: float | None = None
        self._endpoint = endpoint
        self._path: dict[str, str] = scope["path_params"]
        self._headers = Headers(scope=scope)
        self._scope = scope
        self._receive = receive
        self._send = send

    async def serve(self) -> None:
        self._request_id = self._spelling.request_id({}, self._headers)  # errors of the body have it, too
        if "model_name" in self._path:
            await self._find(*self._spelling.model(self._path, {}))  # an unknown model is 404 whatever the body is
        body = await read_body(self._scope, self._receive, self._endpoint.options.max_body_bytes)
        await self._begin_decoding(len(body))
        posted = self._posted(body)
        if isinstance(posted.json, dict):
            await self._choose(posted.json)
        async with self._endpoint.host.enter(self.name, self._version) as model:
            await (self._stream if self._streaming else self._unary)(model, posted)

    async def refuse(self, error: Exception) -> None:
        """Answers with an error, and records it unless the observer of an opened request has done so."""
        if self._model is not None and not self._opened:
            self._model.observers(self._kind).refused(self._request_id, error)
        refused = as_refusal(error, self._endpoint.lifecycle.shutdown_reason)
        status, body = self._spelling.refusal(refused)
        await send_refusal(self._send, status, orjson.dumps(body), refused.retry_after, self._spelling_headers())

    @property
    def _kind(self) -> EndpointKind:
        return EndpointKind.REST_STREAM if self._streaming else EndpointKind.REST_UNARY

    def _spelling_headers(self) -> EncodedHeaders:
        """The headers that the spelling has in every reply."""
        self._request_id = self._request_id or str(uuid4())
        headers = self._spelling.headers(self._request_id)
        ignored = [(_IGNORED_HEADER, ", ".join(map(quote, self._ignored)).encode())] if self._ignored else []
        return [*((name.encode(), value.encode()) for name, value in headers.items()), *ignored]

    async def _find(self, name: str, version: str | None) -> None:
        """Only the name of a model of this package becomes the label of a metric."""
        registry = self._endpoint.host.registry
        if "model_name" not in self._path:
            name = name_of_alias(registry, self._endpoint.options, name) or only_model(registry)
        model: Any = await registry.get_model(name, version)
        if is_ours(model):
            self._model, self.name, self._version = model, name, version
        elif "model_name" in self._path:
            raise ModelNotFound(name, version)
        if "model_name" not in self._path and not isinstance(model, TokenModel):
            raise InvalidInput("model", f"{name} generates no tokens, so it cannot answer requests on this path")

    async def _choose(self, body: JsonObject) -> None:
        """Finds the spelling, the model and the kind of reply that the body asks for."""
        route = self._endpoint.route
        self._spelling = next(spelling for spelling in route.spellings if spelling.accepts(body))
        self._request_id = self._spelling.request_id(body, self._headers)
        if route.streaming is None:
            self._streaming = self._spelling.streams(body)
        if self._model is None:
            await self._find(*self._spelling.model(self._path, body))

    async def _begin_decoding(self, size: int) -> None:
        """Waits until no other large body of the endpoint is decoded, which holds the event loop."""
        if size > _LARGE_BYTES:
            await self._endpoint.decoding.acquire()
            self._decoding_since = time.perf_counter()

    def end_decoding(self) -> None:
        """Lets the next large body be decoded as long afterwards as this one took: streams have the time between."""
        since, self._decoding_since = self._decoding_since, None
        if since is not None:
            pause = time.perf_counter() - since
            asyncio.get_running_loop().call_later(pause, self._endpoint.decoding.release)

    def _posted(self, whole: bytes) -> PostedBody:
        """The body as a JSON object, or as a model that reads bodies itself parses it. Raises RequestError."""
        spelled, raw = split_binary(self._headers, whole)
        if self._model is None or JSON_LENGTH in self._headers:
            body: Any = parse_object(spelled)
        else:
            body = self._model.parse(spelled, self._headers.get("content-type", ""), self._endpoint.route)
        return PostedBody(body, dict(self._headers), raw)

    async def _unary(self, model: ServedModel, posted: PostedBody) -> None:
        reply = self._open(model, posted)
        self.end_decoding()
        try:
            async with watched(self._receive, partial(self._leave, reply)):
                whole, raw = await reply.attached()
        finally:
            reply.close()
        attributes = as_headers(self._cloud_events(model, reply.request_id))
        headers = [(name.encode(), value.encode()) for name, value in attributes.items()]
        headers += self._spelling_headers()
        if raw is None:
            await send_json(self._send, 200, orjson.dumps(whole), headers)
        else:
            await send_whole(self._send, 200, *_with_binary(whole, raw, headers))

    async def _stream(self, model: ServedModel, posted: PostedBody) -> None:
        reply = self._open(model, posted)
        self.end_decoding()
        try:
            notice_lag_early(self._scope)
            async with self._events(reply) as events, watched(self._receive, partial(self._leave, reply)):
                # In a task: an event then resumes the coroutines of the stream alone, not those of all ASGI layers.
                await asyncio.create_task(self._send_all(reply, events))
        finally:
            reply.close()
        if reply.error is not None:
            raise _AlreadyReported from reply.error

    def _open(self, model: ServedModel, posted: PostedBody) -> EndpointReply:
        """The reply, not begun. Raises RequestError."""
        self._request_id = self._request_id or str(uuid4())
        context, route = partial(self._context, model), self._endpoint.route
        asked = (posted, route, self._spelling, self._streaming, self._kind, self._request_id, context)
        with ignored_parameters(self._endpoint.options, self.name, self._request_id) as self._ignored:
            reply = model.reply(RestRequest(*asked))
        self._opened = True
        return reply

    def _context(self, model: ServedModel, request_id: str) -> ReplyContext:
        """A unary reply has the CloudEvents attributes in its HTTP headers, a stream in its first message."""
        headers = self._cloud_events(model, request_id) if self._streaming else {}
        return ReplyContext(model.name, model.version, int(time.time()), headers=headers)

    def _events(self, reply: EndpointReply) -> EventStream:
        options = self._endpoint.options
        return EventStream(
            self._send,
            keep_alive=options.sse_ping_interval if reply.keep_alive else 0.0,
            ping=reply.keep_alive,
            stalled_after=options.stalled_reader_timeout,
            stalled=partial(self._stalled, reply),
            headers=self._spelling_headers(),
        )

    async def _send_all(self, reply: EndpointReply, events: EventStream) -> None:
        """Raises an error only while nothing has been sent; later the stream reports it."""
        named_by = self._spelling.event_name_field
        try:
            async for body in reply.bodies():
                await events.send(orjson.dumps(body), None if named_by is None else body[named_by])
        except Exception as error:
            if not events.started:
                raise
            reply.error = as_refusal(error, self._endpoint.lifecycle.shutdown_reason)
            for body in reply.failure(reply.error):
                await events.send(orjson.dumps(body), None if named_by is None else body[named_by])
        end = reply.end()
        if end is not None:
            await events.send(end)
        await events.end()

    def _leave(self, reply: EndpointReply) -> None:
        self.left = True
        reply.close()

    def _stalled(self, reply: EndpointReply) -> None:
        seconds = self._endpoint.options.stalled_reader_timeout
        logger.warning(f"A client of model '{self.name}' has read nothing for {seconds:g} s: its stream is closed")
        self._leave(reply)
        abort(self._scope)

    def _cloud_events(self, model: ServedModel, request_id: str) -> dict[str, str]:
        response = InferenceResponse(model_name=model.name, id=request_id, outputs=[])
        self._endpoint.host.complete(response, model.settings)
        return extract_headers(response) or {}


def _with_binary(body: JsonObject, raw: bytes, headers: EncodedHeaders) -> tuple[bytes, EncodedHeaders]:
    """The JSON object, followed by the elements of its binary outputs."""
    spelled = orjson.dumps(body)
    length = (JSON_LENGTH.encode(), str(len(spelled)).encode())
    return spelled + raw, [(b"content-type", b"application/octet-stream"), length, *headers]
