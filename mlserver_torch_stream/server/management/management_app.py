"""Serves TorchServe's management API over HTTP, on its own port."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from mlserver.logging import logger
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import NotServing, RequestError, SettingsError
from mlserver_torch_stream.handlers.config.properties import is_true
from mlserver_torch_stream.handlers.config.server_config import ServerConfig
from mlserver_torch_stream.handlers.config.store_files import ManagementRefusal, StoreFiles, bad_request
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle, OneTimeEvent, is_done_before
from mlserver_torch_stream.server.management.managed_models import ManagedModels, RegisteredRepository
from mlserver_torch_stream.server.management.management_calls import ManagementCalls, check_token, read_token
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.server.request import as_refusal
from mlserver_torch_stream.server.rest.connection import ClientLeft, read_body, send_refusal
from mlserver_torch_stream.server.rest.prediction_messages import as_json, reply_headers, request_id_of, status_and_body
from mlserver_torch_stream.server.status import ModelNotLoaded
from mlserver_torch_stream.version import __version__

# Path, method, name of the operation, parameters of the query, statuses.
_OPERATIONS: tuple[tuple[str, str, str, str, str], ...] = (
    ("/", "options", "apiDescription", "", "200"),
    ("/models", "get", "listModels", "limit next_page_token", "200 400"),
    (
        "/models",
        "post",
        "registerModel",
        "url model_name handler runtime batch_size max_batch_delay response_timeout startup_timeout initial_workers "
        "synchronous",
        "200 202 400 404 409 500",
    ),
    ("/models/{model_name}", "get", "describeModel", "customized", "200 404 503"),
    ("/models/{model_name}", "put", "setAutoScale", "min_worker max_worker synchronous timeout", "200 202 400 404 500"),
    ("/models/{model_name}", "delete", "unregisterModel", "", "200 403 404"),
    ("/models/{model_name}/{model_version}", "get", "version_describeModel", "customized", "200 404 503"),
    (
        "/models/{model_name}/{model_version}",
        "put",
        "version_setAutoScale",
        "min_worker max_worker synchronous timeout",
        "200 202 400 404 500",
    ),
    ("/models/{model_name}/{model_version}", "delete", "version_unregisterModel", "", "200 403 404"),
    ("/models/{model_name}/{model_version}/set-default", "put", "setDefault", "", "200 404"),
    ("/v1/models/{model_name}", "get", "ready", "", "200 404"),
)
_INTEGERS = (
    *("limit", "next_page_token", "min_worker", "max_worker", "timeout", "initial_workers"),
    *("batch_size", "max_batch_delay", "response_timeout", "startup_timeout"),
)
_BOOLEANS = ("synchronous", "customized")


def document() -> dict[str, Any]:
    """Returns the OpenAPI document of the management API."""
    paths: dict[str, Any] = {}
    for path, method, operation, query, statuses in _OPERATIONS:
        in_path = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [_parameter(name, "path") for name in in_path] + [
            _parameter(name, "query") for name in query.split()
        ]
        responses = {status: {"description": _DESCRIPTIONS[status]} for status in statuses.split()}
        described = {"operationId": operation, "parameters": parameters, "responses": responses}
        paths.setdefault(path, {})[method] = described
    return {"openapi": "3.0.1", "info": {"title": "TorchServe APIs", "version": __version__}, "paths": paths}


_DESCRIPTIONS = {
    "200": "OK",
    "202": "Accepted",
    "400": "Bad request, or no valid token",
    "403": "The default version cannot be removed before the other versions",
    "404": "Model not found or model version not found",
    "409": "Model already registered",
    "500": "The workers cannot be started",
    "503": "No worker is available",
}


def _parameter(name: str, place: str) -> dict[str, Any]:
    kind = "integer" if name in _INTEGERS else "boolean" if name in _BOOLEANS else "string"
    return {"in": place, "name": name, "required": place == "path" or name == "url", "schema": {"type": kind}}


_MAX_BODY_BYTES = 1 << 20
Reply = tuple[int, Any]  # a status, and the value that is written as JSON


class ManagementApp:
    """The ASGI application. Requests must contain ``token``, unless it is None."""

    def __init__(self, calls: ManagementCalls, token: str | None) -> None:
        self._calls = calls
        self._token = token
        self.ending = OneTimeEvent()  # set when the port is about to close; running requests are then refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_id = request_id_of(request.headers)
        retry_after = None
        try:
            status, found = await self._answer_in_time(request)
            body = as_json(found)
        except ClientLeft:
            return
        except Exception as error:
            refused = as_refusal(error)
            status, body = _status_and_body(refused)
            retry_after = refused.retry_after
        logger.info(f"Management API: {request.method} {scope['path']!r} {status}")
        await send_refusal(send, status, body, retry_after, reply_headers(request_id))

    async def _answer_in_time(self, request: Request) -> Reply:
        """Answers a request, or refuses it if the port closes meanwhile. Raises RequestError or ClientLeft."""
        answering = asyncio.ensure_future(self._answer(request))
        if await is_done_before(answering, self.ending):
            return answering.result()
        answering.cancel()
        raise NotServing("the server is shutting down")

    async def _answer(self, request: Request) -> Reply:
        """Checks the token, and calls the operation of the path. Raises RequestError or ClientLeft."""
        segments = request.scope["path"].rstrip("/").split("/")[1:]
        method = request.method
        if not segments or segments == ["api-description"]:
            if segments or method == "OPTIONS":
                return 200, document()
            raise _wrong_method()
        check_token(self._token, request.headers.get("authorization"))
        if segments[0] == "models" and len(segments) <= 3:
            name, version = ([*segments[1:], None, None])[:2]
            return await (self._of_all(request) if name is None else self._of_one(request, name, version))
        if segments[0] == "models" and len(segments) == 4 and segments[3] == "set-default":
            if method != "PUT":
                raise _wrong_method()
            return 200, {"status": self._calls.set_default(segments[1], segments[2])}
        if segments[:2] == ["v1", "models"] and len(segments) == 3 and method == "GET":
            model = self._calls.models.find(segments[2].partition(":")[0], None)
            return 200, {"name": model.name, "ready": bool(model.ready)}
        raise ManagementRefusal(
            404, "ResourceNotFoundException", "Requested resource is not found, please refer to API document."
        )

    async def _of_all(self, request: Request) -> Reply:
        if request.method == "GET":
            return 200, self._calls.list(request.query_params)
        if request.method == "POST":
            status, said = await self._calls.register(await _parameters(request))
            return status, {"status": said}
        raise _wrong_method()

    async def _of_one(self, request: Request, name: str, version: str | None) -> Reply:
        query = request.query_params
        if request.method == "GET":
            customized = is_true(query.get("customized"))
            headers = {key: value for key, value in request.headers.items() if key != "authorization"}
            return 200, await self._calls.describe(name, version, customized, headers)
        if request.method == "PUT":
            status, said = await self._calls.scale(query, name, version or query.get("model_version"))
            return status, {"status": said}
        if request.method == "DELETE":
            return 200, {"status": await self._calls.unregister(name, version)}
        if request.method == "OPTIONS":
            self._calls.models.find(name, version)
            return 200, document()
        raise _wrong_method()


async def _parameters(request: Request) -> Mapping[str, Any]:
    """Returns the parameters in the query, or in a JSON object in the body. Raises RequestError or ClientLeft."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return request.query_params
    body = await read_body(request.scope, request.receive, _MAX_BODY_BYTES)
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    return {key: value for key, value in found.items() if value is not None}


def _status_and_body(error: RequestError) -> tuple[int, bytes]:
    if isinstance(error, ManagementRefusal):
        return error.status, as_json({"code": error.status, "type": error.kind, "message": error.message})
    return status_and_body(error)


def _wrong_method() -> ManagementRefusal:
    return ManagementRefusal(
        405, "MethodNotAllowedException", "Requested method is not allowed, please refer to API document."
    )


def install(host: ServerHost, options: ServerOptions, lifecycle: Lifecycle, access: AccessControl) -> None:
    """Opens the port that the options name.

    Raises ModelNotLoaded if it cannot listen on the port, and SettingsError for a wrong option.
    """
    port = options.management_port_torchserve
    if not port:
        return
    token, files = read_token(options), _store_files(options)
    config = ServerConfig.read(Path(options.torchserve_config).absolute() if options.torchserve_config else None)
    host.repository = repository = RegisteredRepository(host.repository)
    models = ManagedModels(host.registry, repository, files, config)
    calls = ManagementCalls(models, lifecycle, registers=options.enable_model_api)
    _open(ManagementApp(calls, token), options.management_address, port, lifecycle, access.without_keys())
    if token is None:
        logger.warning("Requests to the management API need no token (disable_token_authorization)")


def _open(app: ManagementApp, host: str, port: int, lifecycle: Lifecycle, access: AccessControl) -> None:
    """Listens on the port. Raises ModelNotLoaded if it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        setting = "management_port_torchserve"
        raise ModelNotLoaded(f"cannot listen on port {port} ({setting}) at {host}: {error}") from None
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
    logger.info(f"TorchServe's management API is on {host}:{port}")


class _Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to MLServer."""

    def __init__(self, app: ManagementApp) -> None:
        super().__init__(uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_config=None))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _store_files(options: ServerOptions) -> StoreFiles:
    """Returns the model store that the options name. Raises SettingsError."""
    folder = Path(options.model_store).absolute() if options.model_store else None
    if folder is not None and not folder.is_dir():
        raise SettingsError(f"{PREFIX}MODEL_STORE: no such folder: {folder}")
    patterns = [each.strip() for each in options.allowed_urls.split(",") if each.strip()]
    try:
        return StoreFiles(folder, patterns)
    except re.error as error:
        raise SettingsError(f"{PREFIX}ALLOWED_URLS: is not a regular expression: {error}") from None
