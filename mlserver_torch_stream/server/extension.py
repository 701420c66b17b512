"""Adds our routes to an MLServer, and opens our additional ports.

With our model repository this happens when the REST server starts. Without it, this happens when the first model of
this package is registered, because MLServer calls no code of this package before that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import grpc
from mlserver.grpc import dataplane_pb2
from mlserver.grpc.interceptors import LoggingInterceptor
from mlserver.logging import logger
from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.instrumentation.grpc import aio_server_interceptor

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.access.guards import GuardedAio
from mlserver_torch_stream.server.batches import Batches
from mlserver_torch_stream.server.grpc.reflection import Reflection, mlserver_files
from mlserver_torch_stream.server.grpc.torchserve import InferenceService, torchserve_file
from mlserver_torch_stream.server.grpc.triton import TritonServicer
from mlserver_torch_stream.server.grpc.triton_messages import triton_file
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle import ports, shutdown
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.management import management_app
from mlserver_torch_stream.server.observability import metrics
from mlserver_torch_stream.server.options import ServerOptions, read_options
from mlserver_torch_stream.server.page import page_routes
from mlserver_torch_stream.server.rest import (
    adapter_routes,
    batch_routes,
    connection,
    endpoints,
    health,
    item_batch,
    model_routes,
    openai_routes,
    predictions,
)
from mlserver_torch_stream.server.rest.direct_predictions import DirectPredictions
from mlserver_torch_stream.server.server_settings import refuse_ignored_keys
from mlserver_torch_stream.server.state import ServerState
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
    """Opens the port on MLServer's host. ``setting`` is the name of the port's setting, which errors contain.

    Raises ModelNotLoaded if the server cannot listen on the port.
    """
    settings = host.settings
    address = settings.host
    listener = GuardedAio(access).server(
        interceptors=_interceptors(settings),
        # so_reuseport would let two processes share a port by mistake. The maximum sizes of messages are the same as on
        # MLServer's port.
        options=[*host.grpc_options(), ("grpc.so_reuseport", 0)],
    )
    listener.add_generic_rpc_handlers(handlers)
    try:
        listener.add_insecure_port(f"{address}:{port}")
    except RuntimeError as error:
        raise ModelNotLoaded(f"cannot listen on port {port} ({setting}) at {address}: {error}") from None
    await listener.start()
    lifecycle.listeners.append(listener.stop)
    logger.info(f"{service} is on {address}:{port}")


def _interceptors(settings: Settings) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors of MLServer's port without the one for metrics, because a process can have only one of
    those.
    """
    access_log = [LoggingInterceptor()] if settings.debug else []
    if not settings.tracing_server:
        return access_log
    return [*access_log, aio_server_interceptor(tracer_provider=get_tracer_provider(settings))]  # type: ignore[no-untyped-call]


def extend_at_start(host: ServerHost, state: ServerState) -> None:
    """Arranges that the server is extended while uvicorn starts it."""

    async def extend_or_end() -> None:
        try:
            await extend(host, state)
        except ModelNotLoaded:
            ports.end_process()

    host.before_listening(extend_or_end)


async def extend(host: ServerHost, state: ServerState) -> ServerOptions:
    """Reads the options, adds the routes and opens the ports of a server. Idempotent.

    Logs an error and raises ModelNotLoaded if a variable is wrong or a port cannot be opened.
    """
    try:
        options = state.options = read_options()
        state.access.check(options)
        if host.extend_once():
            await _extend(host, state, options)
        return options
    except (SettingsError, ModelNotLoaded) as error:
        logger.error(str(error))
        raise ModelNotLoaded(str(error)) from None


async def _extend(host: ServerHost, state: ServerState, options: ServerOptions) -> None:
    ports.check(host, options)
    refuse_ignored_keys(Path(host.settings.model_repository_root))
    connection.install(host, options, DirectPredictions(host, options))
    host.put_before_router(endpoints.pass_to_chosen)
    add_routes(host, state, options)
    shutdown.take_signals()
    _warn_of_server_settings(host.settings)
    await _open_grpc_services(host, state, options)
    management_app.install(host, options, state.lifecycle, state.access)


async def _open_grpc_services(host: ServerHost, state: ServerState, options: ServerOptions) -> None:
    """Opens the ports of Triton's and TorchServe's services, and adds TorchServe's to MLServer's port.

    Raises ModelNotLoaded if the server cannot listen on a port.
    """
    open_ours = partial(open_port, host, state.lifecycle, state.access)
    stalled_after = options.stalled_reader_timeout
    if port := options.grpc_port_triton:
        triton = (
            TritonServicer(host, state, stalled_after).handler(),
            Reflection([triton_file(dataplane_pb2.DESCRIPTOR)]),
        )
        await open_ours(port, "grpc_port_triton", "Triton's gRPC service", triton)
    torchserve, described = InferenceService(host, state.lifecycle, stalled_after).handler(), torchserve_file()
    listener = host.grpc_listener()
    if listener is not None:
        listener.add_generic_rpc_handlers((torchserve, Reflection([*mlserver_files(), described])))
    if port := options.grpc_port_torchserve:
        handlers = (torchserve, Reflection([described]))
        await open_ours(port, "grpc_port_torchserve", "TorchServe's gRPC service", handlers)


def add_routes(host: ServerHost, state: ServerState, options: ServerOptions) -> None:
    """Adds all routes of this package that need no model. Called once for a server."""
    metrics.install(host, options, state.token_metrics, state.weights_metrics, state.sinks)
    openai_routes.add_fallback_routes(host)
    health.add_routes(host, state.lifecycle)
    model_routes.add_routes(host, state)
    openai_routes.add_model_routes(host, options)
    adapter_routes.add_routes(host, options)
    page_routes.add_routes(host, options)
    predictions.add_routes(host, state.lifecycle, options)
    item_batch.add_routes(host, state.lifecycle, options)
    batches = Batches(options.batch_store, host.registry, state)
    batch_routes.add_batch_routes(host, batches, options)


def _warn_of_server_settings(settings: Settings) -> None:
    if settings.parallel_workers:
        logger.warning(
            f"parallel_workers is {settings.parallel_workers}: inference workers cannot stream, so the models of "
            "mlserver-torch-stream stay in the main process. Set parallel_workers to 0 to save the workers' memory."
        )
    if settings.gzip_enabled:
        logger.warning(
            "gzip_enabled is true: the headers of a streamed answer wait for its first token. Set it to false."
        )
