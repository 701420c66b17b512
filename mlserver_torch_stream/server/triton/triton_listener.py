"""The port of Triton's gRPC service, opened beside MLServer's own when the first model of ours is registered.

Knows nothing of the service's methods.
"""

from __future__ import annotations

import grpc
from mlserver.grpc.interceptors import LoggingInterceptor
from mlserver.grpc.server import GRPCServer
from mlserver.grpc.servicers import InferenceServicer
from mlserver.logging import logger
from mlserver.rest.server import RESTServer
from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.instrumentation.grpc import aio_server_interceptor

from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.access.grpc_guard import GuardedAio
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.status import ModelNotLoaded
from mlserver_torch_stream.server.triton.triton_servicer import TritonServicer


async def install(server: RESTServer, options: ServerOptions, lifecycle: Lifecycle, access: AccessControl) -> None:
    """Opens the port if there is to be one. Raises ModelNotLoaded if it cannot be had."""
    port = options.grpc_port_triton
    if not port:
        return
    settings, data_plane, repository = server._settings, server._data_plane, server._model_repository_handlers
    servicer = TritonServicer(InferenceServicer(data_plane, repository), options.stalled_reader_timeout)
    listener = GuardedAio(access).server(
        interceptors=_interceptors(settings),
        # Without so_reuseport two processes cannot share a port by mistake. Sizes are those of MLServer's own port.
        options=[*GRPCServer(settings, data_plane, repository)._get_options(), ("grpc.so_reuseport", 0)],
    )
    listener.add_generic_rpc_handlers((servicer.handler(),))
    try:
        listener.add_insecure_port(f"{settings.host}:{port}")
    except RuntimeError as error:
        raise ModelNotLoaded(
            f"port {port} (grpc_port_triton) cannot be listened on at {settings.host}: {error}"
        ) from None
    await listener.start()
    lifecycle.listeners.append(listener.stop)
    logger.info(f"Triton's gRPC service is on {settings.host}:{port}")


def _interceptors(settings: Settings) -> list[grpc.aio.ServerInterceptor]:
    """Those of MLServer's own port, but for that of its metrics, which may exist once in a process."""
    access_log = [LoggingInterceptor()] if settings.debug else []
    if not settings.tracing_server:
        return access_log
    return [*access_log, aio_server_interceptor(tracer_provider=get_tracer_provider(settings))]  # type: ignore[no-untyped-call]
