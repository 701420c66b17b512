"""The ports of TorchServe's management API, opened beside MLServer's own.

Knows nothing of the API's paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from mlserver.logging import logger
from mlserver.rest.server import RESTServer

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.grpc_port import open_port
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.management.managed_models import ManagedModels
from mlserver_torch_stream.server.management.management_app import ManagementApp
from mlserver_torch_stream.server.management.management_calls import ManagementCalls
from mlserver_torch_stream.server.management.management_service import ManagementService
from mlserver_torch_stream.server.management.management_token import read_token
from mlserver_torch_stream.server.management.registered_repository import RegisteredRepository
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.server.status import ModelNotLoaded
from mlserver_torch_stream.torchserve.model_defaults import read_defaults
from mlserver_torch_stream.torchserve.store_files import StoreFiles

_API = "TorchServe's management API"


async def install(server: RESTServer, options: ServerOptions, lifecycle: Lifecycle, access: AccessControl) -> None:
    """Opens the ports that the options name. Raises ModelNotLoaded for a port that cannot be had, and SettingsError."""
    port, grpc_port = options.management_port_torchserve, options.grpc_management_port_torchserve
    if not port and not grpc_port:
        return
    token, files, defaults = read_token(options), _store_files(options), read_defaults(options.torchserve_config)
    handlers = server._model_repository_handlers
    handlers._repository = repository = RegisteredRepository(handlers._repository)
    models = ManagedModels(server._data_plane._model_registry, repository, files, defaults)
    calls = ManagementCalls(models, lifecycle, registers=options.enable_model_api)
    host, access = options.management_address, access.without_keys()
    if port:
        _open(ManagementApp(calls, token), host, port, lifecycle, access)
    if grpc_port:
        setting, handler = "grpc_management_port_torchserve", ManagementService(calls, token).handler()
        await open_port(server, lifecycle, access, grpc_port, setting, f"{_API} over gRPC", handler, host)
    if token is None:
        logger.warning("Requests to the management API need no token (disable_token_authorization)")


def _open(app: ManagementApp, host: str, port: int, lifecycle: Lifecycle, access: AccessControl) -> None:
    """Raises ModelNotLoaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        setting = "management_port_torchserve"
        raise ModelNotLoaded(f"port {port} ({setting}) cannot be listened on at {host}: {error}") from None
    listener = _Listener(app)
    if access.tls is not None:
        access.tls.configure(listener.config)
    running = asyncio.create_task(listener.serve([listening]))

    async def stop(grace: float) -> None:
        app.ending.set()
        listener.should_exit = True
        await asyncio.wait([running], timeout=grace)
        listener.force_exit = True
        await running

    lifecycle.listeners.append(stop)
    logger.info(f"{_API} is on {host}:{port}")


class _Listener(uvicorn.Server):
    """Leaves signals to MLServer."""

    def __init__(self, app: ManagementApp) -> None:
        super().__init__(uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_config=None))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _store_files(options: ServerOptions) -> StoreFiles:
    """Raises SettingsError."""
    folder = Path(options.model_store).absolute() if options.model_store else None
    if folder is not None and not folder.is_dir():
        raise SettingsError(f"{PREFIX}MODEL_STORE: no such folder: {folder}")
    patterns = [each.strip() for each in options.allowed_urls.split(",") if each.strip()]
    try:
        return StoreFiles(folder, patterns)
    except re.error as error:
        raise SettingsError(f"{PREFIX}ALLOWED_URLS: not a pattern: {error}") from None
