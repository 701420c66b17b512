"""One request at any door, and the model of this package that answers it.

A door reads its own wire, and writes the reply or the refusal to it. ``Request`` finds the model, enters it, holds the
reply, and records and refuses what fails. A ``ServedModel`` gives a ``reply`` to REST endpoints, a ``message_reply`` to
gRPC and Triton's service, and a prediction to TorchServe's paths and services.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
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
from mlserver_torch_stream.server.host import Hook, ServerHost, find_model, measured, registry_of, wrap
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
    """A request to a REST endpoint, read and not decoded. ``spelling``: the one of the route that accepts the body."""

    posted: PostedBody
    route: RestRoute
    spelling: Spelling
    endpoint: EndpointKind
    request_id: str
    context: Context
    adapter: str | None = None  # the LoRA adapter whose name was that of the model


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A request over gRPC as MLServer has converted it. ``index`` numbers those of a stream; None: the call is unary.

    ``following``: all further messages of the stream, if this is its first one.
    """

    payload: InferenceRequest
    request_id: str
    endpoint: EndpointKind
    index: int | None = None
    following: AsyncIterator[InferenceRequest] | None = None


class Reply(Protocol):
    """The reply to one request: read once, as a stream of messages or as a whole."""

    error: Exception | None  # that the stream has reported after its first message

    @property
    def request_id(self) -> str: ...

    @property
    def keep_alive(self) -> bytes:
        """As in ``Spelling``."""

    @property
    def reads_following(self) -> bool:
        """True if the reply reads all further messages of its gRPC stream itself."""

    def bodies(self) -> AsyncIterator[JsonObject]: ...

    async def whole(self) -> JsonObject:
        """Raises RequestError."""

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """The whole reply, and the raw bytes that follow its JSON."""

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        """The last messages of the sequences that have not ended."""

    def end(self) -> bytes | None: ...

    def close(self) -> None:
        """Synchronous and idempotent."""


class Piece(Protocol):
    """One intermediate response of a handler, or its last one. The first one has the status and the headers."""

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
    """The reply to one request, read once: in pieces or whole. Reading begins it, if ``begin`` has not."""

    def begin(self, more: bool = False) -> object:
        """``more``: the next request of its batch follows at once. Raises RequestError."""

    async def whole(self) -> bytes:
        """All pieces joined. Raises RequestError."""

    def pieces(self) -> AsyncGenerator[Any, None]:
        """Each a ``Piece``. Raises RequestError."""

    def close(self) -> None:
        """Synchronous and idempotent."""


class ServedModel(ABC):
    """A model of this package. All its replies are not begun when they are returned."""

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
        """The value that MLServer sets after the load, as long as the model has no trouble."""
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
        """Requests of one gRPC stream that run at once. No property: MLServer reads those of a model that still loads.

        Raises NotServing.
        """

    def parse(self, raw: bytes, content_type: str, route: RestRoute) -> Any:
        """A body without binary tensors, as ``reply`` takes it. Raises RequestError."""
        return parse_object(raw)

    @abstractmethod
    def reply(self, request: RestRequest) -> Reply:
        """For the REST endpoints. Raises RequestError."""

    @abstractmethod
    def message_reply(self, message: MessageRequest) -> Reply:
        """For gRPC. Raises RequestError."""

    @abstractmethod
    def message_failure(self, request_id: str, index: int, error: Exception) -> Sequence[JsonObject]:
        """The responses to a message of a stream that could not be read."""

    @abstractmethod
    def open_prediction(
        self,
        fields: Sequence[BodyField],
        headers: Mapping[str, str],
        request_id: str,
        endpoint: EndpointKind,
        parameters: Mapping[str, Any] = MappingProxyType({}),
        whole_sequence: bool = False,
    ) -> PieceReply:
        """For TorchServe's own paths and its gRPC service. ``parameters``: V2's of the request's sequence, of which a
        worker sees, with ``whole_sequence``, each request once and from the first on. Raises RequestError."""

    def describe_workers(self) -> dict[str, Any]:
        """For TorchServe's management API. Raises NotServing."""
        return {"workers": []}


class HandlerModel(ServedModel):
    """A model that runs a TorchServe handler in workers."""

    @abstractmethod
    async def scale_workers(self, least: int, most: int, grace: float | None) -> None:
        """Has between ``least`` and ``most`` workers; ``grace``: seconds for those that end. Raises NotServing or
        LoadFailed."""


def is_ours(model: MLModel | None) -> TypeGuard[ServedModel]:
    """Whether the model is one of this package, and no model of another runtime."""
    return isinstance(model, ServedModel)


def find_accepted(
    registry: MultiModelRegistry, name: str, version: str | None, accepts: Callable[[MLModel | None], bool]
) -> Any:
    """The model. Raises NoSuchModel, also if it is not accepted, and NoSuchVersion if the name has other versions."""
    model = find_model(registry, name, version)
    if accepts(model):
        return model
    if model is not None or version is None or not accepts(find_model(registry, name, None)):
        raise NoSuchModel(name)
    raise NoSuchVersion(name, version)


def no_handler(name: str, path: str = "/v1/chat/completions") -> InvalidInput:
    """The error of a request that needs a handler, to a model that generates tokens. ``path``: one that it answers."""
    message = f"{name} generates tokens and runs no TorchServe handler: ask it at {path} or /v2/models/{name}/generate"
    return InvalidInput("model", message)


_INTERNAL = "internal server error"


class Closable(Protocol):
    """Something that is closed when the request ends."""

    def close(self) -> None:
        """Synchronous and idempotent."""


R = TypeVar("R", bound=Closable)


class Request(Generic[R]):
    """Once it has a model, every failure of it is recorded once: here, or by the observer of its reply.

    ``door``: how the log names a request that is refused before it has a model; empty: the log does not have it.
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
        self.reply: R | None = None  # once there is one, its observer records what fails
        self.left = False  # the client reads nothing any more
        self._lifecycle = lifecycle
        self._door = door

    def find(
        self, registry: MultiModelRegistry, name: str, version: str | None, other: Exception | None = None
    ) -> ServedModel:
        """Only a model of this package gets requests. ``other``: the error for one of another runtime, instead of
        ModelNotFound. Raises ModelNotFound."""
        model = find_model(registry, name, version)
        if not is_ours(model):
            raise ModelNotFound(name, version) if model is None or other is None else other
        self.model, self.version = model, version
        return model

    @asynccontextmanager
    async def entered(self, host: ServerHost) -> AsyncIterator[ServedModel]:
        """The model, while MLServer measures the request. The reply that the block opens is closed at its end."""
        assert self.model is not None
        async with host.enter(self.model.name, self.version) as model:
            try:
                yield model
            finally:
                self.close()

    def following(self, request_id: str) -> Request[R]:
        """A further request of the same stream."""
        return Request(self._lifecycle, self.kind, request_id, self.model)

    def record(self, error: Exception) -> None:
        """Reports a refusal to the metrics and the log, unless the reply's observer does so."""
        if self.reply is None and self.model is not None:
            self.model.observers(self.kind).refused(self.request_id, error)

    def refuse(self, error: Exception) -> RequestError:
        """The error as the client gets it."""
        self.record(error)
        refusal = as_refusal(error, self._lifecycle.shutdown_reason)
        if self.model is None and self._door:
            logger.info(f"A request {self._door} was refused: {refusal.message!r}")  # a model's name may hold lines
        return refusal

    def leave(self) -> None:
        """The client has left, or is given up."""
        self.left = True
        self.close()

    def close(self) -> None:
        """Ends the reply. Synchronous and idempotent: it may run in a task that cannot wait."""
        if self.reply is not None:
            self.reply.close()


def install() -> None:
    """Passes requests to our models whether they are ready or not: they refuse with a status of their own. Called once.

    MLServer refuses with 400, at which Seldon Core 2 loads the model again; and it has no state for a model that still
    accepts requests although routers should send no new ones.
    """
    wrap(Hook.ENTER, _entering)


def _entering(original: Callable[..., AbstractAsyncContextManager[MLModel]]) -> Callable[..., Any]:
    @asynccontextmanager
    async def enter(data_plane: DataPlane, name: str, version: str | None = None) -> AsyncIterator[MLModel]:
        model = find_model(registry_of(data_plane), name, version)
        if not is_ours(model):
            async with original(data_plane, name, version) as model:
                yield model
            return
        with measured(data_plane, name, version), model.inflight.track(), _as_model(model.settings):
            yield model

    return enter


@contextmanager
def _as_model(settings: ModelSettings) -> Iterator[None]:
    """MLServer's ``model_context``, which raises where another task closes the stream of a client that disconnected."""
    tokens = [(model_name_var, model_name_var.set(settings.name))]
    tokens += [(model_version_var, model_version_var.set(settings.version or ""))]
    try:
        yield
    finally:
        for variable, token in tokens:
            with suppress(ValueError):  # that task has a context of its own, in which there is nothing to reset
                variable.reset(token)


def as_refusal(error: Exception, shutdown_reason: str | None = None) -> RequestError:
    """Any exception as an error of the error table. An unexpected exception is a bug, and logged with its traceback.

    ``shutdown_reason``: why the process accepts no more requests; None while it does. In V2 a request to a registered
    model is never answered 400 or 404: Seldon Core 2's agent takes these statuses as "model not loaded" and reloads the
    model.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ModelNotReady):
        return NotServing(str(error))
    if isinstance(error, ModelNotFound) and shutdown_reason is not None:
        return NotServing(shutdown_reason)  # an interrupted load has left the registry: 404 would be wrong
    if isinstance(error, MLServerError):
        refused = RequestError(str(error))
        refused.status = int(error.status_code)
        if isinstance(error, ModelNotFound):
            refused.field, refused.code = UnknownModel.field, UnknownModel.code
        return refused
    logger.error("A request failed", exc_info=error)
    return GenerationFailed(_INTERNAL)
