"""Refuses gRPC calls without a key, and gives the ports of a gRPC server their certificate.

Knows no service. A call is refused before a message of it is read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from mlserver_torch_stream.errors import Unauthorized
from mlserver_torch_stream.server.access.access_control import AccessControl


async def _refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, Unauthorized().message)


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
        if keys is None or keys.accept(given) or self._access.open.grpc(handler_call_details.method):
            return await continuation(handler_call_details)
        return _REFUSED


class GuardedAio:
    """The part of ``grpc.aio`` that MLServer creates its server with."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def server(self, *args: Any, interceptors: Any = (), **options: Any) -> aio.Server:
        """``grpc.aio.server``, guarded; its ports have the certificate, if there is one."""
        server = aio.server(*args, interceptors=[GrpcGuard(self._access), *interceptors], **options)
        if self._access.tls is not None:
            credentials = self._access.tls.grpc_credentials()
            server.add_insecure_port = lambda address: server.add_secure_port(address, credentials)
        return server
