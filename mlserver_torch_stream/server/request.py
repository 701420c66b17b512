"""One request, at any door of the server, and the model that answers it.

A door is one of the places where requests arrive: a REST endpoint, a gRPC service, TorchServe's paths. The door reads
the request, and writes the reply or the refusal. ``Request`` finds and enters the model, keeps the reply, and records
failures. A ``ServedModel`` makes a ``reply`` for REST endpoints, a ``message_reply`` for gRPC and Triton's service, and
a prediction for TorchServe's paths and services.
"""

from __future__ import annotations

import contextvars
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from mlserver import MLModel, ModelSettings
from mlserver.context import model_name_var, model_version_var
from mlserver.errors import MLServerError, ModelNotFound, ModelNotReady
from mlserver.handlers import DataPlane
from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, RequestError, UnknownModel
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext, Spelling
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.host import Hook, ServerHost, find_model, registry_of, request_metrics, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import InflightRequests, Lifecycle, ModelSlot
from mlserver_torch_stream.server.observability.request_observer import (
    EndpointKind,
    ModelRequestObservers,
    RequestReports,
)
from mlserver_torch_stream.server.rest.connection import parse_object
from mlserver_torch_stream.server.rest.prediction_messages import BodyField, NoSuchModel, NoSuchVersion

Context = Callable[[str], ReplyContext]
"""Makes the context of a reply from the id of its request."""


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A request to a REST endpoint whose body has been read but not decoded.

    ``spelling`` is the spelling of the route that accepts the body.
    """

    posted: PostedBody
    route: RestRoute
    spelling: Spelling
    endpoint: EndpointKind
    request_id: str
    context: Context
    adapter: str | None = None  # the LoRA adapter that the request names as its model


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A gRPC request, converted by MLServer.

    ``index`` is the position of the request in its stream, from 0; None in a unary call. ``following`` yields the
    further messages of the stream; only the first request of a stream has it.
    """

    payload: InferenceRequest
    request_id: str
    endpoint: EndpointKind
    index: int | None = None
    following: AsyncIterator[InferenceRequest] | None = None


class Reply(Protocol):
    """The reply to one request. It can be read once, as a stream of messages or as a whole."""

    error: Exception | None  # the error that the stream has reported after its first message

    @property
    def request_id(self) -> str:
        """The client's id of the request, or else the id that the server has given it."""

    @property
    def keep_alive(self) -> bytes:
        """The SSE block that is sent while the stream has no events; empty if no block is sent."""

    @property
    def reads_following(self) -> bool:
        """True if the reply reads all further messages of its gRPC stream itself."""

    def bodies(self) -> AsyncIterator[JsonObject]:
        """Yields the messages of the stream. Raises RequestError."""

    async def whole(self) -> JsonObject:
        """Collects the stream into one reply. Raises RequestError."""

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """Returns the whole reply, and the raw bytes after its JSON; None if there are no such bytes. Raises
        RequestError.
        """

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        """Returns the messages that end each open sequence with ``error``."""

    def end(self) -> bytes | None:
        """Returns the data of a final event, such as ``[DONE]``; None if the stream ends with its last message."""

    def close(self) -> None:
        """Ends the work of the request. It does not await, and a second call does nothing."""


class Piece(Protocol):
    """One response of a handler, either an intermediate response or the last one. The first piece has the status and
    the headers.
    """

    @property
    def value(self) -> bytes: ...
    @property
    def last(self) -> bool: ...
    @property
    def content_type(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class PieceReply(Protocol):
    """The reply of a handler to one request. It can be read once, in pieces or as a whole.

    Reading the reply begins the request, unless ``begin`` has done so.
    """

    def begin(self, more: bool = False) -> object:
        """Begins the request. ``more`` says that the next request of the same batch follows at once.

        Raises RequestError.
        """

    def when_arrived(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` once the first piece, an error or the end has arrived. The request must have begun."""

    def arrived_whole(self) -> Piece | None:
        """Returns the answer if it consists of one piece, which has arrived; else None."""

    def answered(self) -> None:
        """Ends the request after the client was sent what ``arrived_whole`` has returned."""

    async def whole(self) -> bytes:
        """Returns the joined bytes of all pieces. Raises RequestError."""

    def pieces(self) -> AsyncGenerator[Any, None]:
        """Yields each ``Piece`` as it arrives. Raises RequestError."""

    def close(self) -> None:
        """Ends the work of the request. It does not await, and a second call does nothing."""


class ServedModel(ABC):
    """A model of this package. The replies that it returns start their work when they are first read."""

    name: str
    version: str | None
    settings: ModelSettings
    created: int  # seconds since the epoch
    rest_routes: Sequence[RestRoute]
    _reports: RequestReports
    _slot: ModelSlot[Any]
    _loaded: bool

    @property
    def ready(self) -> bool:
        """Whether MLServer has marked the model as loaded and nothing prevents it from answering."""
        return self._loaded and self.trouble is None

    @ready.setter
    def ready(self, loaded: bool) -> None:
        self._loaded = loaded

    @property
    def trouble(self) -> str | None:
        """The reason why the model is not ready; None if it is ready."""
        return self._slot.trouble or (None if self._loaded else "it is loading")

    @property
    def inflight(self) -> InflightRequests:
        """The requests that the model is answering."""
        return self._slot.inflight

    def observers(self, endpoint: EndpointKind) -> ModelRequestObservers:
        """Makes the observers of the model's requests, which report them."""
        return ModelRequestObservers(self._reports, self.name, self.version, endpoint)

    @abstractmethod
    def most_open(self) -> int:
        """Returns the number of requests of one gRPC stream that may run at once. Raises NotServing if the model is not
        loaded.

        It is a method, because MLServer reads all properties of a model, even while the model loads.
        """

    def parse(self, raw: bytes, content_type: str, route: RestRoute) -> Any:
        """Parses a body without binary tensors into the value that ``reply`` reads. Raises RequestError."""
        return parse_object(raw)

    @abstractmethod
    def reply(self, request: RestRequest) -> Reply:
        """Makes the reply to a request of a REST endpoint. Raises RequestError."""

    @abstractmethod
    def message_reply(self, message: MessageRequest) -> Reply:
        """Makes the reply to a request over gRPC. Raises RequestError."""

    @abstractmethod
    def message_failure(self, request_id: str, index: int, error: Exception) -> Sequence[JsonObject]:
        """Returns the responses to message ``index`` of a gRPC stream if the message could not be read because of
        ``error``.
        """

    def open_prediction(
        self,
        fields: Sequence[BodyField],
        headers: Mapping[str, str],
        request_id: str,
        endpoint: EndpointKind,
        parameters: Mapping[str, Any] = MappingProxyType({}),
        whole_sequence: bool = False,
    ) -> PieceReply:
        """Makes the reply to a request of TorchServe's own paths or of its gRPC service. Raises RequestError.

        ``parameters`` are V2's parameters that name the request's sequence. With ``whole_sequence`` a worker gets each
        request of the sequence once, beginning with the first. A model without a handler refuses.
        """
        raise no_handler(self.name)

    def describe_workers(self) -> dict[str, Any]:
        """Describes the model's workers as TorchServe's management API does. Raises NotServing if the model is not
        loaded.
        """
        return {"workers": []}


class HandlerModel(ServedModel):
    """A model that runs a TorchServe handler in workers."""

    @abstractmethod
    async def scale_workers(self, least: int, most: int, grace: float | None) -> None:
        """Starts or ends workers, so that there are at least ``least`` and at most ``most``. A worker that must end has
        ``grace`` seconds to finish.

        Raises NotServing if the model is not loaded, and LoadFailed if a worker cannot be started.
        """


def is_ours(model: MLModel | None) -> TypeGuard[ServedModel]:
    """Whether the model belongs to this package rather than to another runtime."""
    return isinstance(model, ServedModel)


def find_accepted(
    registry: MultiModelRegistry, name: str, version: str | None, accepts: Callable[[MLModel | None], bool]
) -> Any:
    """Finds the model. Raises NoSuchModel if it is missing or not accepted, and NoSuchVersion if only this version of
    it is.
    """
    model = find_model(registry, name, version)
    if accepts(model):
        return model
    if model is not None or version is None or not accepts(find_model(registry, name, None)):
        raise NoSuchModel(name)
    raise NoSuchVersion(name, version)


def no_handler(name: str, path: str = "/v1/chat/completions") -> InvalidInput:
    """Returns the error for a request that needs a handler but names a model that generates tokens, which answers at
    ``path``.
    """
    message = (
        f"{name} generates tokens and has no TorchServe handler; send requests to {path} or /v2/models/{name}/generate"
    )
    return InvalidInput("model", message)


_INTERNAL = "internal server error"


class Closable(Protocol):
    """Something that is closed when the request ends."""

    def close(self) -> None:
        """Ends the work of the request. It does not await, and a second call does nothing."""


R = TypeVar("R", bound=Closable)


class Request(Generic[R]):
    """One request at any door. It has the model, once ``find`` has found it, and the reply, and it records a failure.

    If the request has a model, a failure is recorded once, either here or by the reply's observer. If a request is
    refused before it has a model, the log names the ``door``. If ``door`` is empty, such a refusal is not logged.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        kind: EndpointKind,
        request_id: str = "",
        model: ServedModel | None = None,
        door: str = "",
    ) -> None:
        self.kind = kind
        self.request_id = request_id
        self.model = model
        self.version: str | None = None
        self.reply: R | None = None  # the reply's observer records failures, once there is a reply
        self.left = False  # True: the client has stopped reading
        self._lifecycle = lifecycle
        self._door = door

    def find(
        self, registry: MultiModelRegistry, name: str, version: str | None, other: Exception | None = None
    ) -> ServedModel:
        """Returns the model. Raises ModelNotFound if this package has no such model. For a model of another runtime,
        raises ``other`` instead, if it is given.
        """
        model = find_model(registry, name, version)
        if not is_ours(model):
            raise ModelNotFound(name, version) if model is None or other is None else other
        self.model, self.version = model, version
        return model

    def entered(self, host: ServerHost, begun: EnteredModel | None = None) -> AbstractAsyncContextManager[ServedModel]:
        """Enters the model, so that MLServer measures the request during the ``with`` block. At its end the reply is
        closed. ``begun`` is the model that was entered already.
        """
        assert self.model is not None
        return _ClosedAtEnd(begun or host.enter(self.model.name, self.version), self)

    def following(self, request_id: str) -> Request[R]:
        """Makes the ``Request`` of a further message of the same stream."""
        return Request(self._lifecycle, self.kind, request_id, self.model)

    def record(self, error: Exception) -> None:
        """Reports a refusal to the metrics and the log, unless the reply's observer does so."""
        if self.reply is None and self.model is not None:
            self.model.observers(self.kind).refused(self.request_id, error)

    def refuse(self, error: Exception) -> RequestError:
        """Records the error, and returns the error that the client gets."""
        self.record(error)
        refusal = as_refusal(error, self._lifecycle.shutdown_reason)
        if self.model is None and self._door:
            logger.info(f"A request {self._door} was refused: {refusal.message!r}")  # a name may have line breaks
        return refusal

    def leave(self) -> None:
        """Called when the client has disconnected, or when the server has given up on the client."""
        self.left = True
        self.close()

    def close(self) -> None:
        """Ends the reply. Idempotent, and synchronous, because it may run in a task that can no longer await."""
        if self.reply is not None:
            self.reply.close()


class _ClosedAtEnd(AbstractAsyncContextManager[ServedModel]):
    """Enters a model, and closes the request's reply before the model is left."""

    def __init__(self, entered: AbstractAsyncContextManager[Any], request: Closable) -> None:
        self._entered = entered
        self._request = request

    async def __aenter__(self) -> ServedModel:
        model: ServedModel = await self._entered.__aenter__()
        return model

    async def __aexit__(self, *error: Any) -> None:
        try:
            self._request.close()
        finally:
            await self._entered.__aexit__(*error)


def install() -> None:
    """Makes MLServer pass requests to our models even if they are not ready. The models then refuse with the right
    status.

    MLServer itself would refuse with 400, which makes Seldon Core 2 load the model again. MLServer also has no state
    for a model that still accepts requests although routers should send no new ones. Called once.
    """
    wrap(Hook.ENTER, _entering)


def _entering(original: Callable[..., AbstractAsyncContextManager[MLModel]]) -> Callable[..., Any]:
    def enter(data_plane: DataPlane, name: str, version: str | None = None) -> AbstractAsyncContextManager[Any]:
        model = find_model(registry_of(data_plane), name, version)
        return EnteredModel(data_plane, name, version, model) if is_ours(model) else original(data_plane, name, version)

    return enter


class EnteredModel(AbstractAsyncContextManager[ServedModel]):
    """Yields a model, while MLServer measures the request and the request counts as in flight.

    It is a class, because every request enters a model, and a class takes less time than generators. It also replaces
    MLServer's ``model_context``, which raises an error if another task closes the stream after a disconnect.
    """

    def __init__(self, data_plane: DataPlane, name: str, version: str | None, model: ServedModel) -> None:
        self._model = model
        self._metrics = request_metrics(data_plane, name, version)
        self._began = 0.0

    def begin(self) -> None:
        """Enters the model, in code that cannot await. ``async with`` continues from here."""
        self._began = time.perf_counter()
        self._model.inflight.began()

    def end(self, kind: type[BaseException] | None = None) -> None:
        """Leaves the model, after an exception of class ``kind``."""
        self._model.inflight.ended()
        seconds, failures, successes = self._metrics
        if kind is None:
            successes.inc()
        elif issubclass(kind, Exception):
            failures.inc()
        seconds.observe(time.perf_counter() - self._began)

    def run(self, call: Callable[[], object]) -> None:
        """Calls a function so that MLServer's log names the model in its lines."""
        _context_of(self._model.name, self._model.settings.version or "").run(call)

    async def __aenter__(self) -> ServedModel:
        settings = self._model.settings
        self._names = model_name_var.set(settings.name), model_version_var.set(settings.version or "")
        if not self._began:
            self.begin()
        return self._model

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.end(kind)
        name, version = self._names
        with suppress(ValueError):  # the other task's context was never set, so it needs no reset
            model_name_var.reset(name)
            model_version_var.reset(version)


@lru_cache(maxsize=256)
def _context_of(name: str, version: str) -> contextvars.Context:
    """Returns a context in which MLServer's log names the model."""
    context = contextvars.copy_context()
    context.run(model_name_var.set, name)
    context.run(model_version_var.set, version)
    return context


def as_refusal(error: Exception, shutdown_reason: str | None = None) -> RequestError:
    """Returns any exception as an error of the error table. An unexpected exception is a bug, and is logged with its
    traceback.

    ``shutdown_reason`` is the reason why the process accepts no more requests; None while it accepts them. In V2 a
    request to a registered model never gets 400 or 404, because Seldon Core 2's agent would interpret them as "model
    not loaded" and reload the model.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ModelNotReady):
        return NotServing(str(error))
    if isinstance(error, ModelNotFound) and shutdown_reason is not None:
        return NotServing(shutdown_reason)  # not 404: an interrupted load has removed the model
    if isinstance(error, MLServerError):
        refused = RequestError(str(error))
        refused.status = int(error.status_code)
        if isinstance(error, ModelNotFound):
            refused.field, refused.code = UnknownModel.field, UnknownModel.code
        return refused
    logger.error("A request failed", exc_info=error)
    return GenerationFailed(_INTERNAL)
