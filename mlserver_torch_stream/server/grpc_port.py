"""Opens gRPC ports of this package beside MLServer's, and finds MLServer's own gRPC listener."""

from __future__ import annotations

from typing import Any

import grpc
from grpc import aio
from mlserver.grpc.interceptors import LoggingInterceptor
from mlserver.grpc.server import GRPCServer
from mlserver.logging import logger
from mlserver.rest.server import RESTServer
from mlserver.server import MLServer
from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.instrumentation.grpc import aio_server_interceptor

from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.access.guards import GuardedAio
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.status import ModelNotLoaded


async def open_port(
    server: RESTServer,
    lifecycle: Lifecycle,
    access: AccessControl,
    port: int,
    setting: str,
    service: str,
    handler: grpc.GenericRpcHandler,
) -> None:
    """Opens the port on MLServer's host. ``setting`` is the name of the port's setting, for errors.

    Raises ModelNotLoaded if the port cannot be had.
    """
    settings = server._settings
    host = settings.host
    mlservers_port = GRPCServer(settings, server._data_plane, server._model_repository_handlers)
    listener = GuardedAio(access).server(
        interceptors=_interceptors(settings),
        # Without so_reuseport two processes cannot share a port by mistake. Sizes are those of MLServer's own port.
        options=[*mlservers_port._get_options(), ("grpc.so_reuseport", 0)],
    )
    listener.add_generic_rpc_handlers((handler,))
    try:
        listener.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ModelNotLoaded(f"port {port} ({setting}) cannot be listened on at {host}: {error}") from None
    await listener.start()
    lifecycle.listeners.append(listener.stop)
    logger.info(f"{service} is on {host}:{port}")


def mlservers_listener(server: RESTServer) -> aio.Server | None:
    """MLServer's own gRPC listener, which runs already; None if no MLServer has made this registry.

    The REST server does not know it; the registry calls a method of the MLServer at each load.
    """
    for hook in server._data_plane._model_registry._on_model_load:
        owner: Any = getattr(hook, "__self__", None)
        if isinstance(owner, MLServer):
            return owner._grpc_server._server
    return None


def _interceptors(settings: Settings) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of MLServer's own port without that of its metrics, which can exist only once in a process."""
    access_log = [LoggingInterceptor()] if settings.debug else []
    if not settings.tracing_server:
        return access_log
    return [*access_log, aio_server_interceptor(tracer_provider=get_tracer_provider(settings))]  # type: ignore[no-untyped-call]
