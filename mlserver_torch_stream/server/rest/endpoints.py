"""The REST endpoints of our models. Each answers a request with one JSON reply or one stream of events.

They serve requests for our models and for unknown models. A path that names a model of another runtime does not match,
so MLServer serves it. MLServer's counters and CloudEvents headers come from its data plane, as for any model.
MLServer's response cache is not used, because sampled replies differ.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

import orjson
from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry
from mlserver.types import InferenceResponse
from mlserver.utils import extract_headers
from starlette.datastructures import Headers
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request as StarletteRequest
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.host import Hook, ServerHost, find_model, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_observer import EndpointKind, ignored_parameters
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import R, Reply, Request, RestRequest, ServedModel, is_ours
from mlserver_torch_stream.server.rest.connection import (
    JSON_LENGTH,
    ClientLeft,
    EncodedHeaders,
    WatchedConnection,
    abort,
    notice_lag_early,
    parse_object,
    read_body,
    send_json,
    send_refusal,
    send_whole,
    split_binary,
)
from mlserver_torch_stream.server.rest.sse import EventStream
from mlserver_torch_stream.server.status import as_headers
from mlserver_torch_stream.server.token_model import TokenModel, find_adapter, name_of_alias, only_model

_IGNORED_HEADER = b"x-ignored-parameters"
_LARGE_BYTES = 2**14  # a body of this size with a JSON schema can take 20 ms to decode


@dataclass(frozen=True)
class Endpoint:
    """The ASGI application of one row of the table."""

    host: ServerHost
    lifecycle: Lifecycle
    options: ServerOptions
    route: RestRoute
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)  # held while a large body is decoded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await EndpointRequest(self, scope, receive, send).answer()


class Door(Protocol):
    """The part of an endpoint that its requests use."""

    @property
    def host(self) -> ServerHost: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def options(self) -> ServerOptions: ...


class Reported(Exception):
    """Raised when a stream has failed and its client has been told. MLServer counts a failure when it sees this
    exception.
    """


class HttpRequest(Request[R], ABC):
    """A request over HTTP. A subclass reads and answers the request in ``serve``; it sends errors in ``send_error`` if
    nothing has been sent.
    """

    def __init__(self, door: Door, scope: Scope, receive: Receive, send: Send, kind: EndpointKind) -> None:
        super().__init__(door.lifecycle, kind)
        self._host = door.host
        self._options = door.options
        self._scope = scope
        self._receive = receive
        self._send = send

    async def answer(self) -> None:
        """Calls ``serve``, and answers with an error if it fails."""
        try:
            await self.serve()
        except ClientLeft:
            pass
        except Reported as reported:
            await self.end_failed(log_text(reported.__cause__))
        except asyncio.CancelledError:
            if not self.left:
                raise
        except Exception as error:
            await self.send_error(self.refuse(error))

    @abstractmethod
    async def serve(self) -> None:
        """Answers the request. May raise any error until the first byte is sent, and afterwards only Reported."""

    @abstractmethod
    async def send_error(self, error: RequestError) -> None:
        """Answers with the error. Nothing has been sent before."""

    async def end_failed(self, why: str) -> None:
        """Logs the reason when a stream has failed after its start."""
        logger.warning(f"A stream of model '{self.name}' failed: {why}")

    @property
    def name(self) -> str:
        return "" if self.model is None else self.model.name

    async def body(self) -> bytes:
        """Reads the body, decompressed. Raises RequestError or ClientLeft."""
        return await read_body(self._scope, self._receive, self._options.max_body_bytes)

    def watched(self) -> WatchedConnection:
        """Closes the reply if the client disconnects during the ``with`` block."""
        return WatchedConnection(self._scope, self._receive, self.leave)

    def give_up(self) -> None:
        """Closes the connection of a client that reads nothing."""
        seconds = self._options.stalled_reader_timeout
        logger.warning(f"A client of model '{self.name}' has read nothing for {seconds:g} s: its stream is closed")
        self.leave()
        abort(self._scope)


class EndpointRequest(HttpRequest[Reply]):
    """A request to an endpoint of the table of paths."""

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        route = endpoint.route
        kind = EndpointKind.REST_STREAM if route.streaming else EndpointKind.REST_UNARY
        super().__init__(endpoint, scope, receive, send, kind)
        self._spelling = route.spellings[0]  # the path's first spelling writes errors until the body is read
        self._decoding_since: float | None = None
        self._adapter: str | None = None  # the LoRA adapter that the body names as its model
        self._endpoint = endpoint
        self._path: dict[str, str] = scope["path_params"]
        self._headers = Headers(scope=scope)
        self._ignored: list[str] = []  # the names of unknown parameters that are ignored

    async def serve(self) -> None:
        """Reads the request, lets the model answer it, and sends the reply."""
        self.request_id = self._spelling.request_id({}, self._headers)  # errors in the body are answered with this id
        if "model_name" in self._path:
            self._find({})  # an unknown model is 404 even if the body is wrong
        body = await self.body()
        await self._begin_decoding(len(body))
        try:
            posted = self._posted(body)
            if isinstance(posted.json, dict):
                self._choose(posted.json)
            async with self.entered(self._host) as model:
                reply = self._open(model, posted)
                self._end_decoding()
                await (self._stream if self.kind.streams else self._unary)(model, reply)
        finally:
            self._end_decoding()

    async def send_error(self, error: RequestError) -> None:
        status, body = self._spelling.refusal(error)
        await send_refusal(self._send, status, orjson.dumps(body), error.retry_after, self._spelling_headers())

    def _spelling_headers(self) -> EncodedHeaders:
        """Returns the headers that the spelling adds to every reply."""
        self.request_id = self.request_id or str(uuid4())
        headers = self._spelling.headers(self.request_id)
        ignored = [(_IGNORED_HEADER, ", ".join(map(quote, self._ignored)).encode())] if self._ignored else []
        return [*((name.encode(), value.encode()) for name, value in headers.items()), *ignored]

    def _find(self, body: JsonObject) -> None:
        """Finds the model that the path names. If the path names none, finds the model that the body names."""
        name, version = self._spelling.model(self._path, body)
        if "model_name" in self._path:
            self.find(self._host.registry, name, version)
            return
        name = name_of_alias(self._host.registry, self._options, name) or only_model(self._host.registry)
        if find_model(self._host.registry, name, None) is None and version is None:
            owner = find_adapter(self._host.registry, name)
            if owner is not None:
                self._adapter, name = name, owner.name
                body["model"] = name
        other = InvalidInput("model", f"{name} generates no tokens, so it cannot answer requests on this path")
        if not isinstance(self.find(self._host.registry, name, version, other), TokenModel):
            raise other

    def _choose(self, body: JsonObject) -> None:
        """Chooses the spelling, the model and the kind of reply for the body."""
        route = self._endpoint.route
        self._spelling = next(spelling for spelling in route.spellings if spelling.accepts(body))
        self.request_id = self._spelling.request_id(body, self._headers)
        if route.streaming is None and self._spelling.streams(body):
            self.kind = EndpointKind.REST_STREAM
        if self.model is None:
            self._find(body)

    async def _begin_decoding(self, size: int) -> None:
        """Waits until no other large body of the endpoint is being decoded, because decoding blocks the event loop."""
        if size > _LARGE_BYTES:
            await self._endpoint.decoding.acquire()
            self._decoding_since = time.perf_counter()

    def _end_decoding(self) -> None:
        """Allows the next large body to be decoded, after a pause as long as this decoding, in which streams can
        continue.
        """
        since, self._decoding_since = self._decoding_since, None
        if since is not None:
            pause = time.perf_counter() - since
            asyncio.get_running_loop().call_later(pause, self._endpoint.decoding.release)

    def _posted(self, whole: bytes) -> PostedBody:
        """Parses the body as a JSON object. If the path names a model and the body has no binary tensors, the model
        parses it.

        Raises RequestError.
        """
        spelled, raw = split_binary(self._headers, whole)
        if self.model is None or JSON_LENGTH in self._headers:
            body: Any = parse_object(spelled)
        else:
            body = self.model.parse(spelled, self._headers.get("content-type", ""), self._endpoint.route)
        return PostedBody(body, dict(self._headers), raw)

    async def _unary(self, model: ServedModel, reply: Reply) -> None:
        async with self.watched():
            whole, raw = await reply.attached()
        attributes = as_headers(self._cloud_events(model, reply.request_id))
        headers = [(name.encode(), value.encode()) for name, value in attributes.items()]
        headers += self._spelling_headers()
        if raw is None:
            await send_json(self._send, 200, orjson.dumps(whole), headers)
        else:
            await send_whole(self._send, 200, *_with_binary(whole, raw, headers))

    async def _stream(self, model: ServedModel, reply: Reply) -> None:
        notice_lag_early(self._scope)
        async with self._events(reply) as events, self.watched():
            # In a separate task an event resumes only the stream's coroutines, not those of all ASGI layers.
            await asyncio.create_task(self._send_all(reply, events))
        if reply.error is not None:
            raise Reported from reply.error

    def _open(self, model: ServedModel, posted: PostedBody) -> Reply:
        """Makes the reply, but does not begin to generate it. Raises RequestError."""
        self.request_id = self.request_id or str(uuid4())
        context, route = partial(self._context, model), self._endpoint.route
        request = RestRequest(posted, route, self._spelling, self.kind, self.request_id, context, self._adapter)
        with ignored_parameters(self._options, model.name, self.request_id) as self._ignored:
            reply = self.reply = model.reply(request)
        return reply

    def _context(self, model: ServedModel, request_id: str) -> ReplyContext:
        """Makes the context of a reply. For a stream, it includes the CloudEvents attributes, which are in the first
        message. A unary reply has them in its HTTP headers.
        """
        headers = self._cloud_events(model, request_id) if self.kind.streams else {}
        return ReplyContext(self._adapter or model.name, model.version, int(time.time()), headers=headers)

    def _events(self, reply: Reply) -> EventStream:
        return EventStream(
            self._send,
            keep_alive=self._options.sse_ping_interval if reply.keep_alive else 0.0,
            ping=reply.keep_alive,
            stalled_after=self._options.stalled_reader_timeout,
            stalled=self.give_up,
            headers=self._spelling_headers(),
        )

    async def _send_all(self, reply: Reply, events: EventStream) -> None:
        """Sends the events of a reply. An error is raised only before the first byte; afterwards it is reported in the
        stream.
        """
        named_by = self._spelling.event_name_field
        try:
            async for body in reply.bodies():
                await events.send(orjson.dumps(body), None if named_by is None else body[named_by])
        except Exception as error:
            if not events.started:
                raise
            reply.error = self.refuse(error)
            for body in reply.failure(reply.error):
                await events.send(orjson.dumps(body), None if named_by is None else body[named_by])
        end = reply.end()
        if end is not None:
            await events.send(end)
        await events.end()

    def _cloud_events(self, model: ServedModel, request_id: str) -> dict[str, str]:
        response = InferenceResponse(model_name=model.name, id=request_id, outputs=[])
        self._host.complete(response, model.settings)
        return extract_headers(response) or {}


def _with_binary(body: JsonObject, raw: bytes, headers: EncodedHeaders) -> tuple[bytes, EncodedHeaders]:
    """Returns the body and the headers of a reply with binary outputs. The body is JSON followed by raw bytes."""
    spelled = orjson.dumps(body)
    length = (JSON_LENGTH.encode(), str(len(spelled)).encode())
    return spelled + raw, [(b"content-type", b"application/octet-stream"), length, *headers]


class SelectiveRoute(Route):
    """A route that may decline a path in ``takes``. ``of_models`` is true if its path or its requests name a model.

    If ``alone`` is true, no other route has the path, so nothing is declined, and a request with another method gets
    405.

    If ``methods`` is None, the route accepts every method if the endpoint is an ASGI application, else only GET. The
    fixed beginning of a path is compared before its pattern, because a server has dozens of patterns.
    """

    of_models = False
    alone = False

    def __init__(self, path: str, endpoint: Callable[..., Any], methods: list[str] | None = None) -> None:
        super().__init__(path, endpoint, methods=methods, name=f"torch_stream:{path}")
        self._prefix = path.partition("{")[0]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not scope["path"].startswith(self._prefix) and not scope.get("root_path"):
            return Match.NONE, {}
        match, child = super().matches(scope)
        taken = self.alone or (match is Match.FULL and self.takes(scope, child["path_params"]))
        return (match, child) if taken else (Match.NONE, {})

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        """Whether the route accepts the request, given the parameters in its path."""
        return True


def add_endpoints(host: ServerHost, lifecycle: Lifecycle, options: ServerOptions, rows: Sequence[RestRoute]) -> None:
    """Adds routes for the rows whose paths the server does not have yet. Called for each model of this package."""
    known = {route.path for route in host.router.routes if isinstance(route, _OurRoute)}
    new = [row for row in rows if row.path not in known]
    host.add_routes([_OurRoute(row.path, Endpoint(host, lifecycle, options, row), host.registry) for row in new])


class _OurRoute(SelectiveRoute):
    """A route that matches its path unless the path names a model of another runtime."""

    of_models = True

    def __init__(self, path: str, endpoint: Endpoint, registry: MultiModelRegistry) -> None:
        super().__init__(path, endpoint, ["POST"])
        self.alone = "model_name" not in self.param_convertors
        self._registry = registry

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        model = find_model(self._registry, path["model_name"], path.get("model_version"))
        return model is None or is_ours(model)


# --- MLServer's metrics of the REST port ---

_Call = Callable[[Any, Scope, Receive, Send], Awaitable[None]]
_CHOSEN = "mlserver_torch_stream.route"  # in a scope: the route of the request, and what the route adds to the scope
_DISCONNECTED, _FAILED = 499, 500  # statuses of requests without an answer


def count_requests() -> None:
    """Counts the requests to model paths in MLServer's metrics ``rest_server_*``, more cheaply than MLServer does.
    Called once.

    MLServer's middleware builds the URL of each request and compares the routes' paths a second time to find the label
    ``path``, which takes longer than many answers do. Here the route is found once, before the request is passed on,
    and the router does not compare the paths again. Requests to other paths are left to the middleware and the router.
    """
    wrap(Hook.REST_METRICS, _counting)


def pass_to_chosen(router: ASGIApp) -> ASGIApp:
    """Returns an app that passes a request to the route that was found for it, and other requests to the router."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        chosen = scope.get(_CHOSEN)
        if chosen is None:
            await router(scope, receive, send)
            return
        route, child = chosen
        scope.update(child)
        await route.handle(scope, receive, send)

    return call


def _counting(original: _Call) -> _Call:
    async def call(middleware: Any, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = _choose(scope) if scope["type"] == "http" and not scope.get("root_path") else None
        if chosen is None:
            await original(middleware, scope, receive, send)
            return
        route, child = chosen
        answering = middleware.app
        if isinstance(answering, ExceptionMiddleware):  # our routes raise nothing that it would answer
            scope.update(child)
            answering = route.handle
        else:  # for example the middleware of CORS, which changes the answer
            scope[_CHOSEN] = chosen
        await _counted(middleware, answering, route.path, scope, receive, send)

    return call


def _choose(scope: Scope) -> tuple[SelectiveRoute, Scope] | None:
    """Returns the route that takes the request, and what it adds to the scope; None if the path is not of a model."""
    app = scope["app"]
    for route in _routes_by_part(app).alike(app.router.routes, scope["path"]):
        match, child = route.matches(scope)
        if match is Match.FULL:
            return (route, child) if isinstance(route, SelectiveRoute) and route.of_models else None
    return None


class _RoutesByPart:
    """The routes of an app, by the first part of their paths: of dozens of routes, few are compared with a path."""

    def __init__(self) -> None:
        self._routes: list[Any] = []
        self._of_part: dict[str, list[Any]] = {}
        self._of_any: list[Any] = []  # those whose first part is a parameter

    def alike(self, routes: list[Any], path: str) -> list[Any]:
        """Returns, in their order, the routes that may match the path."""
        if routes != self._routes:
            parts = [_first_part(route.path) for route in routes]
            both = list(zip(parts, routes, strict=True))
            self._of_any = [route for part, route in both if part is None]
            self._of_part = {
                each: [route for part, route in both if part in (each, None)] for each in parts if each is not None
            }
            self._routes = list(routes)
        return self._of_part.get(path[1:].partition("/")[0], self._of_any)


def _first_part(path: str) -> str | None:
    """Returns the first part of a route's path; None if it has a parameter, or is missing."""
    part = path[1:].partition("/")[0]
    return None if not part or "{" in part else part


@lru_cache(maxsize=16)
def _routes_by_part(app: Any) -> _RoutesByPart:
    return _RoutesByPart()


class CountedRequest:
    """Counts and times one request in MLServer's metrics of the REST port, from its creation to its end."""

    def __init__(self, middleware: Any, method: str, path: str) -> None:
        self._labels = middleware, method, path
        self._in_progress = _in_progress(middleware, method)
        self._in_progress.inc()
        self._began = time.perf_counter()

    def end(self, status: int | None, ended: float | None = None) -> None:
        """Called at the end. ``ended`` is the time of the last byte. A request without a status is not counted."""
        self._in_progress.dec()
        if status is None:
            return
        count, seconds = _metrics(*self._labels, status)
        count.inc()
        seconds.observe((ended or time.perf_counter()) - self._began)


COUNTED = "mlserver_torch_stream.counted"  # in a scope: the ``CountedRequest`` that was made before


async def _counted(middleware: Any, answering: ASGIApp, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    counted = scope.get(COUNTED) or CountedRequest(middleware, scope["method"], path)
    status: int | None = None
    ended: float | None = None

    async def noting(message: Message) -> None:
        nonlocal status, ended
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            ended = time.perf_counter()
        await send(message)

    failed: Exception | None = None
    try:
        await answering(scope, receive, noting)
    except Exception as error:
        status, failed = _FAILED, error
    except BaseException:
        counted.end(None)
        raise
    if status is None:
        status = _DISCONNECTED if await StarletteRequest(scope, receive).is_disconnected() else _FAILED
    counted.end(status, ended)
    if failed is not None:
        raise failed


@lru_cache(maxsize=64)
def _in_progress(middleware: Any, method: str) -> Any:
    return middleware.requests_in_progress.labels(method, middleware.app_name)


@lru_cache(maxsize=1024)
def _metrics(middleware: Any, method: str, path: str, status: int) -> tuple[Any, Any]:
    labels = method, path, status, middleware.app_name
    return middleware.request_count.labels(*labels), middleware.request_time.labels(*labels)
