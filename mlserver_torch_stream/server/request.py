"""One request at any door: finds its model, enters it, holds its reply, and records and refuses what fails.

A door reads its own wire, and writes the reply or the refusal to it: REST, gRPC, Triton's service, and TorchServe's
predictions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

from mlserver import MLModel, ModelSettings
from mlserver.context import model_name_var, model_version_var
from mlserver.errors import MLServerError, ModelNotFound, ModelNotReady
from mlserver.handlers import DataPlane
from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.errors import GenerationFailed, NotServing, RequestError, UnknownModel
from mlserver_torch_stream.server.host import Hook, ServerHost, find_model, measured, registry_of, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.served_model import ServedModel, is_ours

_INTERNAL = "internal server error"


class Closable(Protocol):
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
