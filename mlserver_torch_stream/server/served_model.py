"""What the server asks of a model of this package: a token model or a handler model, both a ``ServedModel``.

Every door asks by the same methods: REST endpoints for a ``reply``, gRPC and Triton's service for an opener of replies,
TorchServe's paths and services for a prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

from mlserver import MLModel, ModelSettings
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext, Spelling
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.host import find_model
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests
from mlserver_torch_stream.server.observability.request_log import EndpointKind
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.rest.body import parse_object
from mlserver_torch_stream.server.rest.prediction_errors import NoSuchModel, NoSuchVersion
from mlserver_torch_stream.server.rest.prediction_messages import BodyField
from mlserver_torch_stream.server.streams.stream_session import ReplyOpener

Context = Callable[[str], ReplyContext]
"""Makes the context of a reply from the id of its request."""


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A request to a REST endpoint, read and not decoded. ``spelling``: the one of the route that accepts the body."""

    posted: PostedBody
    route: RestRoute
    spelling: Spelling
    streaming: bool
    endpoint: EndpointKind
    request_id: str
    context: Context


class EndpointReply(Protocol):
    """The reply to one request: read once, as a stream of messages or as a whole."""

    error: Exception | None  # that the stream has reported after its first message

    @property
    def request_id(self) -> str: ...

    @property
    def comments(self) -> bool:
        """True if SSE comments may stand between the events."""

    def bodies(self) -> AsyncIterator[JsonObject]: ...

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """The whole reply, and the raw bytes that follow its JSON."""

    def failure(self, error: Exception) -> Sequence[JsonObject]: ...

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

    def begin(self, more: bool = False) -> None:
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

    @property
    @abstractmethod
    def trouble(self) -> str | None:
        """The reason why the model is not ready; None if it is ready."""

    @property
    @abstractmethod
    def inflight(self) -> InflightRequests:
        """The requests that the model is answering."""

    @property
    @abstractmethod
    def ready(self) -> bool: ...

    @abstractmethod
    def observers(self, endpoint: EndpointKind) -> ModelRequestObservers:
        """Makes the observers of the model's requests, which report them."""

    @abstractmethod
    def recorded_opener(self, endpoint: EndpointKind, request_id: str = "") -> ReplyOpener:
        """Opens the replies to gRPC messages. Records a request that is refused. Raises NotServing."""

    def parse(self, raw: bytes, content_type: str, route: RestRoute) -> Any:
        """A body without binary tensors, as ``reply`` takes it. Raises RequestError."""
        return parse_object(raw)

    @abstractmethod
    def reply(self, request: RestRequest) -> EndpointReply:
        """For the REST endpoints. Raises RequestError."""

    @abstractmethod
    def open_prediction(
        self,
        fields: Sequence[BodyField],
        headers: Mapping[str, str],
        request_id: str,
        endpoint: EndpointKind,
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> PieceReply:
        """For TorchServe's own paths and its gRPC service. ``parameters``: V2's of the request's sequence. Raises
        RequestError."""

    def describe_workers(self) -> dict[str, Any]:
        """For TorchServe's management API. Raises NotServing."""
        return {"workers": []}


class TokenModel(ServedModel):
    """A model that generates tokens."""

    @abstractmethod
    def generator(self, endpoint: EndpointKind) -> Generator:
        """Turns requests into token streams. Raises NotServing."""

    def open_prediction(
        self,
        fields: Sequence[BodyField],
        headers: Mapping[str, str],
        request_id: str,
        endpoint: EndpointKind,
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> PieceReply:
        raise no_handler(self.name)


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
