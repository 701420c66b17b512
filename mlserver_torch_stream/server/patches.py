"""Installs all patches of MLServer.

MLServer passes neither its settings nor its servers to a model. Therefore two methods of the REST server are patched to
find it: the one that starts it, and the one by which it registers a model of ours.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Awaitable, Callable
from functools import partial

from mlserver import MLModel, ModelSettings
from mlserver.rest.server import RESTServer

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.server import extension, request
from mlserver_torch_stream.server.grpc import messages
from mlserver_torch_stream.server.host import Hook, ServerHost, is_worker_process, is_wrapped, use_looped_workers, wrap
from mlserver_torch_stream.server.lifecycle import default_version, registry_lock, shutdown
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.rest import endpoints, health
from mlserver_torch_stream.server.state import ServerState
from mlserver_torch_stream.server.status import extend_grpc_codes


def install(state: ServerState) -> None:
    """Patches MLServer's classes. Idempotent. A REST server is extended when it registers a model of ours."""
    if is_wrapped(Hook.ADD_MODEL):
        return
    extend_grpc_codes()
    shutdown.install(state.lifecycle)
    request.install()
    health.install(state.lifecycle)
    endpoints.count_requests()
    messages.install()
    registry_lock.install(state.registry_lock)
    default_version.install()
    use_looped_workers()
    wrap(Hook.ADD_MODEL, partial(_adding, state))


def install_at_start(repository: type, state: ServerState) -> None:
    """Patches MLServer's classes. A REST server with a ``repository`` of this class is extended when it starts.

    Idempotent.
    """
    install(state)
    if not is_wrapped(Hook.START):
        wrap(Hook.START, partial(_starting, repository, state))
        # Imported objects stay until the process ends. A full garbage collection would visit them all, and stop every
        # stream for some 70 ms. No model exists yet, so an unloaded model is still collected. The imports have left no
        # garbage that is worth a collection.
        gc.freeze()


def _adding(state: ServerState, original: Callable[..., Awaitable[MLModel]]) -> Callable[..., Awaitable[MLModel]]:
    async def add_custom_handlers(server: RESTServer, model: MLModel) -> MLModel:
        if is_ours(model):
            host = ServerHost(server)
            options = await extension.extend(host, state)
            endpoints.add_endpoints(host, state.lifecycle, options, model.rest_routes)
        return await original(server, model)

    return add_custom_handlers


def _starting(
    repository: type, state: ServerState, original: Callable[..., Awaitable[None]]
) -> Callable[..., Awaitable[None]]:
    def start(server: RESTServer) -> Awaitable[None]:
        host = ServerHost(server)
        if isinstance(host.repository, repository):
            extension.extend_at_start(host, state)
        return original(server)

    return start


def keep_out_of_workers(settings: ModelSettings) -> None:
    """Makes MLServer run this model in the main process, whatever the server's ``parallel_workers`` is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the field will be removed in MLServer 1.8
        settings.parallel_workers = 0


def keep_out_of_the_cache(settings: ModelSettings) -> None:
    """Switches MLServer's response cache off for this model, because otherwise every client would get the first
    client's sample.
    """
    settings.cache_enabled = False


def refuse_worker_process() -> None:
    """Raises LoadFailed in an inference worker of MLServer, which cannot stream."""
    if is_worker_process():
        raise LoadFailed(
            "this is an inference worker, which cannot stream (a model with environment_tarball always runs in one); "
            "set parallel_workers to 0 in settings.json and drop environment_tarball"
        )
