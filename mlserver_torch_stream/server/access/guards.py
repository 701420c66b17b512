"""Refuses HTTP requests and gRPC calls without a valid key, and gives gRPC ports their certificate.

A gRPC call is refused before its first message is read. On a stream each message is checked like a separate request.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
import orjson
from grpc import aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlserver_torch_stream.errors import Unauthorized
from mlserver_torch_stream.protocol.anthropic_spelling import ANTHROPIC_MESSAGES
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.host import listen_by
from mlserver_torch_stream.server.rest.connection import send_json
from mlserver_torch_stream.server.rest.prediction_messages import status_and_body

_POLICY_VIOLATION = 1008  # a WebSocket that is closed with it before it is accepted gets 403
_PREFLIGHT = ("origin", "access-control-request-method")
_TORCHSERVE = re.compile(r"/(predictions|explanations)/.*|/v1/models/[^/]+:(predict|explain)", re.DOTALL)


class RestGuard:
    """ASGI middleware that answers a request without a valid key with 401.

    ``metrics_endpoint`` is the path of the metrics, or None. If ``preflights`` is true, the application answers a
    browser's preflight requests, which never have a key.
    """

    def __init__(
        self, app: ASGIApp, access: AccessControl, metrics_endpoint: str | None, preflights: bool = False
    ) -> None:
        self._app = app
        self._access = access
        self._metrics_endpoint = metrics_endpoint
        self._preflights = preflights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._passes(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(_path(scope), send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _passes(self, scope: Scope) -> bool:
        keys, headers = self._access.keys, Headers(scope=scope)
        if keys is None or keys.accept(headers.getlist("authorization")) or keys.accept(_anthropic(headers)):
            return True
        if self._preflights and scope.get("method") == "OPTIONS" and all(name in headers for name in _PREFLIGHT):
            return True
        return self._access.open.rest(scope.get("method", ""), _path(scope), self._metrics_endpoint)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _anthropic(headers: Headers) -> list[str]:
    """Returns the keys in Anthropic's header ``x-api-key``, written as values of ``Authorization``."""
    return [f"Bearer {key}" for key in headers.getlist("x-api-key")]


async def _refuse(path: str, send: Send) -> None:
    """Sends 401 with an error object in the format of the path's protocol."""
    error = Unauthorized()
    headers = [(b"www-authenticate", b"Bearer")]
    if _TORCHSERVE.fullmatch(path):
        status, body = status_and_body(error)
    elif path.startswith(tuple(f"{prefix}/" for prefix in OPENAI_PREFIXES)):
        spelling = ANTHROPIC_MESSAGES if "/v1/messages" in path else OPENAI_CHAT
        status, spelled = spelling.refusal(error)
        body = orjson.dumps(spelled)
        headers += [(name.encode(), value.encode()) for name, value in spelling.headers(str(uuid4())).items()]
    else:
        status, body = error.status, orjson.dumps({"error": error.message})
    await send_json(send, status, body, headers)


async def _abort(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, Unauthorized().message)


def _check_each_message(handler: grpc.RpcMethodHandler, accepts: Callable[[], bool]) -> grpc.RpcMethodHandler:
    """Wraps a stream's handler, so that it reads no more messages once the key is no longer valid.

    Requests in flight are still answered; then the call ends with an error.
    """

    async def behaviour(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        refused = False

        async def accepted() -> AsyncIterator[Any]:
            nonlocal refused
            async for message in messages:
                refused = not accepts()
                if refused:
                    return
                yield message

        async with aclosing(handler.stream_stream(accepted(), context)) as responses:
            async for response in responses:
                yield response
        if refused:
            await _abort(messages, context)

    return grpc.stream_stream_rpc_method_handler(behaviour, handler.request_deserializer, handler.response_serializer)


_REFUSED = grpc.stream_stream_rpc_method_handler(_abort)


class GrpcGuard(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses gRPC calls without a valid key in the metadata ``authorization``, before their messages are read."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        keys, metadata = self._access.keys, handler_call_details.invocation_metadata
        given = [value for name, value in metadata if name == "authorization"]
        if keys is None or self._access.open.grpc(handler_call_details.method):
            return await continuation(handler_call_details)
        accepts = partial(keys.accept, given)
        if not accepts():
            return _REFUSED
        handler = await continuation(handler_call_details)
        streams = handler is not None and handler.stream_stream is not None
        return _check_each_message(handler, accepts) if streams else handler


class GuardedAio:
    """Replaces ``grpc.aio`` in MLServer, which creates its gRPC server with ``grpc.aio.server``."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def server(self, *args: Any, interceptors: Any = (), **options: Any) -> aio.Server:
        """Creates a guarded gRPC server. Its ports use the certificate, if there is one, and may be on IPv6 hosts."""
        guards = [] if self._access.keys is None else [GrpcGuard(self._access)]
        server = aio.server(*args, interceptors=[*guards, *interceptors], **options)
        listen = server.add_insecure_port
        if self._access.tls is not None:
            listen = partial(server.add_secure_port, server_credentials=self._access.tls.grpc_credentials())
        listen_by(server, lambda address: listen(_with_brackets(address)))
        return server


def _with_brackets(address: str) -> str:
    """Puts an IPv6 host into brackets, which gRPC needs and MLServer omits."""
    host, _, port = address.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else address
