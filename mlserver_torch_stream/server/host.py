"""Accesses the private parts of MLServer, uvicorn, starlette and gRPC. No other module uses them.

docs/hooks.md has a row for each part. ``ServerHost`` is one MLServer, reached through its REST server; ``Hook`` and
``GrpcMethod`` list the methods of MLServer that are wrapped; the functions read MLServer's other objects.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Queue, current_process
from typing import Any, TypeVar

import grpc
import uvicorn
from fastapi import FastAPI
from grpc import aio
from mlserver import MLModel, ModelSettings, Settings
from mlserver.errors import MLServerError
from mlserver.grpc import server as grpc_server
from mlserver.grpc import utils
from mlserver.grpc.model_repository import ModelRepositoryServicer
from mlserver.grpc.server import GRPCServer
from mlserver.grpc.servicers import InferenceServicer
from mlserver.handlers import DataPlane, ModelRepositoryHandlers
from mlserver.metrics.prometheus import PrometheusEndpoint
from mlserver.metrics.server import MetricsServer
from mlserver.parallel import pool
from mlserver.parallel.worker import Worker
from mlserver.registry import MultiModelRegistry, SingleModelRegistry
from mlserver.repository import ModelRepository
from mlserver.rest.server import RESTServer
from mlserver.server import MLServer
from mlserver.types import InferenceRequest, InferenceResponse
from prometheus_client import CollectorRegistry
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Scope, Send
from starlette_exporter import PrometheusMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

T = TypeVar("T")
_WRAPPED = "_torch_stream_wrapped"
_EXTENDED = "_torch_stream_extended"


@functools.cache
def process_object(kind: Callable[[], T]) -> T:
    """Returns the process's only object of this class, which is made at the first call.

    MLServer creates a runtime at each load, reloads the module that ``implementation`` names, and passes a runtime no
    object of the server, so a runtime can share state only through the process.
    """
    return kind()


class Hook(Enum):
    """The methods of MLServer that are wrapped, each as a class and a name."""

    ADD_MODEL = (RESTServer, "add_custom_handlers")
    START = (RESTServer, "start")
    STOP = (MLServer, "stop")
    REST_CONFIG = (RESTServer, "_get_config")
    METRICS_CONFIG = (MetricsServer, "_get_config")
    LIVE = (DataPlane, "live")
    READY = (DataPlane, "ready")
    REST_METRICS = (PrometheusMiddleware, "__call__")
    ENTER = (DataPlane, "_infer_contextmanager")
    LOAD = (MultiModelRegistry, "load")
    UNLOAD = (MultiModelRegistry, "unload")
    UNLOAD_VERSION = (MultiModelRegistry, "unload_version")
    FIND_DEFAULT = (SingleModelRegistry, "_find_default")
    REFRESH_DEFAULT = (SingleModelRegistry, "_refresh_default")
    CONVERT = (InferenceServicer, "_InsertHeaders")
    SET_TRAILING_METADATA = (InferenceServicer, "_SetTrailingMetadata")


class GrpcMethod(Enum):
    """The gRPC methods of MLServer that are wrapped inside MLServer's error handling."""

    METADATA = (InferenceServicer, "ModelMetadata")
    INFER = (InferenceServicer, "ModelInfer")
    STREAM = (InferenceServicer, "ModelStreamInfer")
    LOAD = (InferenceServicer, "RepositoryModelLoad")
    UNLOAD = (InferenceServicer, "RepositoryModelUnload")
    REPOSITORY_LOAD = (ModelRepositoryServicer, "RepositoryModelLoad")
    REPOSITORY_UNLOAD = (ModelRepositoryServicer, "RepositoryModelUnload")


def wrap(hook: Hook, wrapper: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces a method by ``wrapper(method)``."""
    owner, name = hook.value
    original = getattr(owner, name)
    replaced = functools.wraps(original)(wrapper(original))
    setattr(replaced, _WRAPPED, True)
    setattr(owner, name, replaced)


def is_wrapped(hook: Hook) -> bool:
    """Whether a method of MLServer is wrapped already."""
    owner, name = hook.value
    return _WRAPPED in vars(getattr(owner, name))


def wrap_inside(method: GrpcMethod, wrapper: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces the function that MLServer's decorator calls, which is a variable of the decorator's closure.

    Replacing the method itself would have no effect. If our model repository is not used, MLServer is patched when our
    first model loads. At that time the gRPC server is running and has stored the methods, and its handlers cannot be
    read back.
    """
    owner, name = method.value
    decorated = getattr(owner, name)
    cell = decorated.__closure__[decorated.__code__.co_freevars.index("f")]
    cell.cell_contents = functools.wraps(cell.cell_contents)(wrapper(cell.cell_contents))


class ServerHost:
    """One MLServer, reached through its REST server."""

    def __init__(self, server: RESTServer) -> None:
        self._server = server

    def extend_once(self) -> bool:
        """Returns True at the first call for a server, and False later."""
        if _EXTENDED in vars(self._server):
            return False
        setattr(self._server, _EXTENDED, True)
        return True

    @property
    def settings(self) -> Settings:
        """MLServer's settings."""
        return self._server._settings

    @property
    def data_plane(self) -> DataPlane:
        """The data plane, which finds the model for a request and measures the request."""
        return self._server._data_plane

    @property
    def registry(self) -> MultiModelRegistry:
        """The registry of the loaded models."""
        return self._server._data_plane._model_registry

    @property
    def repository_handlers(self) -> ModelRepositoryHandlers:
        """The handlers that load and unload models."""
        return self._server._model_repository_handlers

    @property
    def repository(self) -> ModelRepository:
        return self._server._model_repository_handlers._repository

    @repository.setter
    def repository(self, repository: ModelRepository) -> None:
        self._server._model_repository_handlers._repository = repository

    # --- REST ---

    @property
    def router(self) -> Router:
        """The router of the REST app."""
        router: Router = self._server._app.router
        return router

    def add_routes(self, routes: Sequence[BaseRoute]) -> None:
        """Puts the routes before the existing routes."""
        self.router.routes[:0] = routes

    def put_outside(self, middleware: Callable[[ASGIApp], ASGIApp]) -> None:
        """Makes the middleware the outermost layer of the app."""
        app = self._server._app
        if app.middleware_stack is None:
            app.middleware_stack = app.build_middleware_stack()
        app.middleware_stack = middleware(app.middleware_stack)

    def put_before_router(self, middleware: Callable[[ASGIApp], ASGIApp]) -> None:
        """Makes the middleware the innermost layer of the app."""
        router: Any = self.router  # its annotation is narrower than an ASGI application
        router.middleware_stack = middleware(router.middleware_stack)

    def before_listening(self, work: Callable[[], Awaitable[object]]) -> None:
        """Arranges that ``work`` is awaited while uvicorn starts the app: after the gRPC port and before the REST port
        opens.
        """
        router = self.router
        original = router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            await work()
            async with original(app) as state:
                yield state

        router.lifespan_context = lifespan

    @property
    def is_starting(self) -> bool:
        """Whether uvicorn's server exists and does not listen on a port yet."""
        listener = getattr(self._server, "_server", None)
        return listener is not None and not listener.started

    def read_http_by(self, protocol: Callable[..., HttpProtocol]) -> None:
        """Makes uvicorn read new connections with ``protocol``, unless uvicorn uses h11."""
        config = self._server._server.config
        if not config.loaded:
            config.load()
        if config.http_protocol_class is HttpToolsProtocol:
            config.http_protocol_class = protocol

    def enter(self, name: str, version: str | None) -> AbstractAsyncContextManager[MLModel]:
        """Yields the model, while MLServer measures the request. Raises MLServerError if there is no such model, or if
        it is not ready.
        """
        entered: AbstractAsyncContextManager[MLModel] = self.data_plane._infer_contextmanager(name, version)
        return entered

    def complete(self, response: InferenceResponse, settings: ModelSettings) -> None:
        """Adds the headers of CloudEvents to a response, as MLServer's middleware does."""
        self.data_plane._inference_middleware.response_middleware(response, settings)

    # --- gRPC ---

    def servicer(self) -> InferenceServicer:
        """Returns a servicer of MLServer's gRPC service over this server's data plane."""
        return InferenceServicer(self.data_plane, self.repository_handlers)

    def grpc_options(self) -> list[tuple[str, Any]]:
        """Returns the options of MLServer's gRPC port, for example the maximum size of a message."""
        options: list[tuple[str, Any]] = GRPCServer(
            self.settings, self.data_plane, self.repository_handlers
        )._get_options()
        return options

    def grpc_listener(self) -> aio.Server | None:
        """MLServer's gRPC listener, which runs already; None if no MLServer has created this registry.

        The REST server has no reference to the listener. It is found through the registry, which holds a callback of
        the MLServer.
        """
        for called in self.registry._on_model_load:
            owner: Any = getattr(called, "__self__", None)
            if isinstance(owner, MLServer):
                return owner._grpc_server._server
        return None


# --- MLServer's models and their registry ---


def registry_of(owner: DataPlane | InferenceServicer | MLServer) -> MultiModelRegistry:
    """Returns the registry of models that a server, a data plane or a gRPC servicer uses."""
    if isinstance(owner, InferenceServicer):
        owner = owner._data_plane
    return owner._model_registry


def find_model(registry: MultiModelRegistry, name: str, version: str | None) -> MLModel | None:
    """Finds a model as the registry's ``get_model`` does, but synchronously, as is needed for matching routes."""
    versions = versions_of(registry, name)
    return None if versions is None else versions._find_model(version)


def all_models(registry: MultiModelRegistry) -> list[MLModel]:
    """Returns every version of every model."""
    found: list[MLModel] = []
    for versions in registry._models.values():
        found += versioned(versions)
        if versions.default is not None and not versions.default.version:
            found.append(versions.default)
    return found


def default_models(registry: MultiModelRegistry) -> list[MLModel]:
    """Returns the default version of each model, sorted by name."""
    defaults = [versions.default for _, versions in sorted(registry._models.items())]
    return [model for model in defaults if model is not None]


def versions_of(registry: MultiModelRegistry, name: str) -> SingleModelRegistry | None:
    """Returns the registry of one model's versions; None if there is no such model."""
    return registry._models.get(name)


def versioned(versions: SingleModelRegistry) -> list[MLModel]:
    """Returns the models whose settings name a version."""
    return list(versions._versions.values())


def set_default(versions: SingleModelRegistry, model: MLModel | None) -> None:
    """Makes a model the default version of its name; with None there is no default."""
    versions._default = model


def choose_default(versions: SingleModelRegistry) -> None:
    """Makes the registry choose its default version again."""
    versions._refresh_default()


def source_of(settings: ModelSettings) -> str | None:
    """Returns the path of the model's model-settings.json; None if environment variables configure the model."""
    source: str | None = settings._source
    return source


# --- MLServer's metrics, workers and ports ---


@functools.lru_cache(maxsize=256)
def request_metrics(data_plane: DataPlane, name: str, version: str | None) -> tuple[Any, Any, Any]:
    """Returns MLServer's metrics of the requests to a model: their seconds, failures and successes. They are cached,
    because finding them by their labels takes as long as counting.
    """
    labels = {"model": name, "version": version}
    metrics = data_plane._ModelInferRequestDuration, data_plane._ModelInferRequestFailure
    seconds, failures = (each.labels(**labels) for each in metrics)
    return seconds, failures, data_plane._ModelInferRequestSuccess.labels(**labels)


def export_metrics(registry: Callable[[Settings], CollectorRegistry]) -> None:
    """Makes MLServer's metrics endpoints export this registry."""
    PrometheusEndpoint._registry = property(lambda endpoint: registry(endpoint._settings))


class LoopedWorker(Worker):  # type: ignore[misc]
    """MLServer's inference worker, in which models of other runtimes run, changed so that it creates its own event
    loop.

    The worker of MLServer 1.7.1 asks asyncio for the current loop before it runs one. With uvloop up to 0.21, uvloop's
    policy then creates a loop; from 0.22 on, the policy raises RuntimeError, so every worker ends right after its
    start. MLServer's main branch creates a loop as this class does. A worker is a new interpreter, which imports this
    class by its name.
    """

    def _ignore_signals(self, *loop: asyncio.AbstractEventLoop) -> None:
        if not loop:
            asyncio.set_event_loop(asyncio.new_event_loop())
        super()._ignore_signals(*loop)


def use_looped_workers() -> None:
    """Makes MLServer start its workers with ``LoopedWorker`` from now on. Idempotent."""
    pool.Worker = _create_worker


def _create_worker(settings: Settings, responses: Queue[Any], env: Any = None) -> Worker:
    """Creates a worker. For another Python environment it is of MLServer's own class, because this package may be
    missing there.
    """
    return (LoopedWorker if env is None else Worker)(settings, responses, env)


def is_worker_process() -> bool:
    """Whether this process is one of MLServer's inference workers."""
    return isinstance(current_process(), Worker)


def guard_ports(aio_stand_in: Any, guarded: Callable[[uvicorn.Config, Settings, bool], None]) -> None:
    """Guards the ports that MLServer creates from now on.

    ``aio_stand_in`` replaces ``grpc.aio`` in MLServer, which creates its gRPC server by ``grpc.aio.server``.
    ``guarded`` changes the configuration of an HTTP port; its last argument says whether the port is the REST port.
    """
    grpc_server.aio = aio_stand_in

    def guarding(original: Callable[[Any], uvicorn.Config]) -> Callable[[Any], uvicorn.Config]:
        def get_config(server: Any) -> uvicorn.Config:
            config = original(server)
            guarded(config, server._settings, isinstance(server, RESTServer))
            return config

        return get_config

    for hook in (Hook.REST_CONFIG, Hook.METRICS_CONFIG):
        wrap(hook, guarding)


def ports_are_guarded() -> bool:
    """Whether ``guard_ports`` was called, so that the ports check keys."""
    return grpc_server.aio is not aio


@dataclass(frozen=True)
class Listeners:
    """The uvicorn and gRPC servers of one MLServer. ``metrics`` is None if there is no separate port for metrics."""

    rest: Any
    grpc: aio.Server
    metrics: Any | None


def listeners_of(server: MLServer) -> Listeners:
    """Returns the servers of the REST, gRPC and metrics ports."""
    metrics = server._metrics_server
    return Listeners(
        server._rest_server._server, server._grpc_server._server, None if metrics is None else metrics._server
    )


# --- gRPC ---


def convert_message(servicer: InferenceServicer, message: Any, context: grpc.ServicerContext) -> InferenceRequest:
    """Converts a message to MLServer's request class. The call's metadata become headers."""
    return servicer._InsertHeaders(message, context)


def send_headers(servicer: InferenceServicer, result: InferenceResponse, context: grpc.ServicerContext) -> None:
    """Sends the response's headers as the call's trailing metadata."""
    servicer._SetTrailingMetadata(result, context)


def grpc_code(error: MLServerError) -> grpc.StatusCode:
    """Returns the gRPC code that MLServer uses for an error."""
    code: grpc.StatusCode = utils._grpc_status_code(error)
    return code


def add_grpc_codes(codes: Mapping[int, grpc.StatusCode]) -> None:
    """Adds gRPC codes for HTTP statuses that MLServer does not know."""
    utils.STATUS_CODE_MAPPING.update(codes)


def listen_by(server: aio.Server, listen: Callable[[str], int]) -> None:
    """Makes the gRPC server call ``listen`` with the address when it opens a port."""
    server.add_insecure_port = listen


# --- uvicorn ---


def transport_of(send: Send) -> Any | None:
    """Returns the connection's transport, if ``send`` is uvicorn's own; else None."""
    return getattr(getattr(send, "__self__", None), "transport", None)


def counting_layer(app: Any, ours: type) -> PrometheusMiddleware | None:
    """Returns the layer of the REST app that counts requests, if no layer does anything else to a prediction; else
    None.

    ``app`` is the outermost layer, and ``ours`` is the class of the layer that this package adds.
    """
    counting = None
    while not isinstance(app, ExceptionMiddleware):
        if isinstance(app, PrometheusMiddleware):
            counting = app
        if type(app) is FastAPI:
            app = app.middleware_stack
        elif type(app) in (ProxyHeadersMiddleware, ServerErrorMiddleware, PrometheusMiddleware, ours):
            app = app.app
        else:
            return None
    return counting


class ReceivedRequest:
    """A request whose body is complete, and of which the app does not know yet. Either ``answer`` or ``pass_on`` is
    called, once.
    """

    def __init__(self, protocol: Any, cycle: RequestResponseCycle) -> None:
        self.protocol = protocol  # a subclass of ``HttpProtocol``
        self.scope: Scope = cycle.scope  # type: ignore[assignment]
        self._cycle = cycle

    @property
    def body(self) -> bytes:
        return bytes(self._cycle.body)

    @property
    def client_reads(self) -> bool:
        """False if the client has disconnected, or has not read its previous answers."""
        return not self._cycle.disconnected and not self.protocol.flow.write_paused

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Sends a whole answer, in the bytes that uvicorn would write."""
        cycle = self._cycle
        head = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        cycle.response_started = cycle.response_complete = True
        cycle.transport.writelines((b"".join(head), body))
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        cycle.on_response = lambda: None  # as uvicorn does, because it refers to the connection

    def pass_on(self) -> None:
        """Passes the request to the app."""
        self.protocol.start(self._cycle)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1 protocol with hooks for a subclass.

    When a client disconnects, all its pipelined requests end. For an HTTP/1.0 client, the end of the connection marks
    the end of the response.
    """

    refusal = ""  # the reason why the current head is refused

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._earlier: list[RequestResponseCycle] = []  # pipelined requests before the newest
        self._kept: RequestResponseCycle | None = None  # the request that the app gets once its body is complete

    def takes_head(self) -> bool:
        """Called when a request's head is complete. The request begins if the method returns True. Raises ValueError to
        refuse the head.
        """
        return True

    def takes_end(self) -> bool:
        """Called at the end of a request. If the method returns False, the request continues."""
        return True

    def keeps(self, scope: Scope) -> bool:
        """Called when a request begins. If the method returns True, ``received`` is called once the body is complete;
        until then the app does not know of the request.
        """
        return False

    def received(self, request: ReceivedRequest) -> None:
        """Called with a request that was kept."""

    def start(self, cycle: RequestResponseCycle) -> None:
        """Lets the app answer a request."""
        super()._start_asgi_task(cycle, self.app)

    def kept_alive(self) -> None:
        """Called when the connection is closed because no further request has arrived."""

    def refuse_head(self, why: str) -> None:
        """Refuses the current head with status 400, and closes the connection."""
        self.send_400_response(why)

    @property
    def client_may_send(self) -> bool:
        return not self.flow.read_paused

    def read_on(self) -> None:
        """Reads the connection again, so that its end is noticed: uvicorn stops reading at a large part of a body."""
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def declines(self) -> bool:
        """Whether the current request offers an upgrade to a protocol that uvicorn does not speak."""
        offered = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        return offered and not self._should_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all pipelined requests; uvicorn ends only the newest."""
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        if self._kept is not None:  # the app counts it
            self.start(self._kept)
            self._kept = None

    def on_headers_complete(self) -> None:
        if not self.takes_head():
            return
        self._earlier = [cycle for cycle in (*self._earlier, self.cycle) if cycle and not cycle.response_complete]
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClosed

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_plain = app is self.app and not self.access_log and self.limit_concurrency is None
        if is_plain and cycle.more_body and self.keeps(cycle.scope):  # type: ignore[arg-type]
            self._kept = cycle
        else:
            super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if not self.takes_end():
            return
        super().on_message_complete()
        cycle, self._kept = self._kept, None
        if cycle is not None:
            self.received(ReceivedRequest(self, cycle))

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self.refusal or msg)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.kept_alive()


class _UntilClosed(RequestResponseCycle):
    """The response to an HTTP/1.0 client, which cannot read chunks. The end of the connection marks the end of the
    body.
    """

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))  # uvicorn refuses more than was declared
        await super().send(message)
