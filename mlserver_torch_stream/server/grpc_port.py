"""Opens gRPC ports of this package beside MLServer's."""

from __future__ import annotations

import grpc
from mlserver.grpc.interceptors import LoggingInterceptor
from mlserver.logging import logger
from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.instrumentation.grpc import aio_server_interceptor

from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.access.guards import GuardedAio
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.status import ModelNotLoaded


async def open_port(
    host: ServerHost,
    lifecycle: Lifecycle,
    access: AccessControl,
    port: int,
    setting: str,
    service: str,
    handlers: tuple[grpc.GenericRpcHandler, ...],
) -> None:
    """Opens the port on MLServer's host. ``setting`` is the name of the port's setting, for errors.

    Raises ModelNotLoaded if the port cannot be had.
    """
    settings = host.settings
    address = settings.host
    listener = GuardedAio(access).server(
        interceptors=_interceptors(settings),
        # Without so_reuseport two processes cannot share a port by mistake. Sizes are those of MLServer's own port.
        options=[*host.grpc_options(), ("grpc.so_reuseport", 0)],
    )
    listener.add_generic_rpc_handlers(handlers)
    try:
        listener.add_insecure_port(f"{address}:{port}")
    except RuntimeError as error:
        raise ModelNotLoaded(f"port {port} ({setting}) cannot be listened on at {address}: {error}") from None
    await listener.start()
    lifecycle.listeners.append(listener.stop)
    logger.info(f"{service} is on {address}:{port}")


def _interceptors(settings: Settings) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of MLServer's own port without that of its metrics, which can exist only once in a process."""
    access_log = [LoggingInterceptor()] if settings.debug else []
    if not settings.tracing_server:
        return access_log
    return [*access_log, aio_server_interceptor(tracer_provider=get_tracer_provider(settings))]  # type: ignore[no-untyped-call]
