"""Installs all patches of MLServer, and warns of server settings that do not suit streams.

Knows nothing of a model's contents. MLServer passes its settings to no model, so they are read from the REST server
when it registers a model of ours.
"""

from __future__ import annotations

import functools
import multiprocessing
import warnings

from mlserver import MLModel, ModelSettings
from mlserver.logging import logger
from mlserver.parallel.worker import Worker
from mlserver.rest.server import RESTServer
from mlserver.settings import Settings

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.server import grpc_messages, grpc_refusals
from mlserver_torch_stream.server.batches.served_rows import ServedRows
from mlserver_torch_stream.server.batches.service import BatchService
from mlserver_torch_stream.server.lifecycle import default_version, health, ports, readiness, registry_lock, shutdown
from mlserver_torch_stream.server.management import management_listener
from mlserver_torch_stream.server.observability import telemetry
from mlserver_torch_stream.server.options import ServerOptions, read_options
from mlserver_torch_stream.server.process_state import CLIENT_LOAD, LIFECYCLE, REGISTRY_LOCK
from mlserver_torch_stream.server.rest import (
    batch_routes,
    http1,
    model_routes,
    openai_models,
    openai_unknown,
    routes,
    torchserve_routes,
)
from mlserver_torch_stream.server.status import ModelNotLoaded, extend_grpc_codes
from mlserver_torch_stream.server.triton import triton_listener

_MARK = "_torch_stream_patched"


def install() -> None:
    """Patches MLServer's classes, and adds our routes when its REST server registers a model of ours. Idempotent."""
    original = RESTServer.add_custom_handlers
    if getattr(original, _MARK, False):
        return
    extend_grpc_codes()
    shutdown.install()
    readiness.install()
    grpc_messages.install()
    grpc_refusals.install()
    registry_lock.install(REGISTRY_LOCK)
    default_version.install()

    @functools.wraps(original)
    async def add_custom_handlers(server: RESTServer, model: MLModel) -> MLModel:
        if not readiness.is_ours(model):
            return await original(server, model)
        options = _options()
        if not getattr(server, _MARK, False):
            setattr(server, _MARK, True)
            ports.check(server, options)
            routes.install(server)
            http1.install(server)
            telemetry.install(server, options)
            openai_unknown.add_routes(server)
            health.add_routes(server, LIFECYCLE)
            model_routes.add_routes(server)
            openai_models.add_routes(server)
            torchserve_routes.add_routes(server, options, LIFECYCLE)
            models = ServedRows(server._data_plane._model_registry, CLIENT_LOAD, LIFECYCLE)
            service = BatchService(options.batch_store, models, LIFECYCLE)
            batch_routes.add_batch_routes(server, service, options)
            shutdown.take_signals()
            warn_of_server_settings(server._settings)
            await triton_listener.install(server, options, LIFECYCLE)
            await management_listener.install(server, options, LIFECYCLE)
        routes.add(server, options, model.rest_routes)
        return await original(server, model)

    setattr(add_custom_handlers, _MARK, True)
    RESTServer.add_custom_handlers = add_custom_handlers


def _options() -> ServerOptions:
    try:
        return read_options()
    except SettingsError as error:
        logger.error(str(error))
        raise ModelNotLoaded(str(error)) from None


def warn_of_server_settings(settings: Settings) -> None:
    if settings.parallel_workers:
        logger.warning(
            f"parallel_workers is {settings.parallel_workers}: inference workers cannot stream, so the models of "
            "mlserver-torch-stream stay in the main process. Set parallel_workers to 0 to save the workers' memory."
        )
    if settings.gzip_enabled:
        logger.warning(
            "gzip_enabled is true: the headers of a streamed answer wait for its first token. Set it to false."
        )


def keep_out_of_workers(settings: ModelSettings) -> None:
    """Makes MLServer run this model in the main process, whatever the server's ``parallel_workers``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the field is to go in MLServer 1.8
        settings.parallel_workers = 0


def keep_out_of_the_cache(settings: ModelSettings) -> None:
    """Switches MLServer's response cache off: every client would get the sample of the first."""
    settings.cache_enabled = False


def refuse_worker_process() -> None:
    if isinstance(multiprocessing.current_process(), Worker):
        raise LoadFailed(
            "this is an inference worker, which cannot stream (a model with environment_tarball always runs in one); "
            "set parallel_workers to 0 in settings.json and drop environment_tarball"
        )
