"""Refuses gRPC calls without a key, and gives the ports of a gRPC server their certificate.

Knows no service. A call is refused before a message of it is read; of a call with many messages, each is a request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from grpc import aio

from mlserver_torch_stream.errors import Unauthorized
from mlserver_torch_stream.server.access.access_control import AccessControl


async def _refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, Unauthorized().message)


def _check_each_message(handler: grpc.RpcMethodHandler, accepts: Callable[[], bool]) -> grpc.RpcMethodHandler:
    """Stops reading messages when the key is no longer valid. Requests in flight are answered; then the call is
    refused."""

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
            await _refuse(messages, context)

    return grpc.stream_stream_rpc_method_handler(behaviour, handler.request_deserializer, handler.response_serializer)


_REFUSED = grpc.stream_stream_rpc_method_handler(_refuse)


class GrpcGuard(aio.ServerInterceptor):  # type: ignore[misc]
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
    """Stands in for ``grpc.aio``, from which MLServer takes the function that creates its server."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def server(self, *args: Any, interceptors: Any = (), **options: Any) -> aio.Server:
        """``grpc.aio.server``, guarded; its ports have the certificate, if there is one, and may be of IPv6 hosts."""
        server = aio.server(*args, interceptors=[GrpcGuard(self._access), *interceptors], **options)
        listen = server.add_insecure_port
        if self._access.tls is not None:
            listen = partial(server.add_secure_port, server_credentials=self._access.tls.grpc_credentials())
        server.add_insecure_port = lambda address: listen(_with_brackets(address))
        return server


def _with_brackets(address: str) -> str:
    """The address as gRPC reads it: MLServer puts host and port together without the brackets of an IPv6 host."""
    host, _, port = address.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else address
