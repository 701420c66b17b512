"""The base of our runtimes: patches MLServer, gives readiness a reason, and answers gRPC calls through an opener."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mlserver import ModelSettings
from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse

from mlserver_torch_stream.errors import LoadFailed, NotServing, RequestError, SettingsError
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.protocol.spellings import REST_ROUTES, RestRoute
from mlserver_torch_stream.protocol.v2_reply import as_response
from mlserver_torch_stream.server import patches
from mlserver_torch_stream.server.host import source_of
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.observability.request_log import EndpointKind
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.served_model import ServedModel
from mlserver_torch_stream.server.state import server_state
from mlserver_torch_stream.server.status import ModelNotLoaded, as_server_error
from mlserver_torch_stream.server.streams.stream_session import GrpcReply, ReplyOpener, StreamSession
from mlserver_torch_stream.settings_file import place_of_error, refuse_stray_keys

if TYPE_CHECKING:

    class MLModel:
        """The part of MLServer's class that our runtimes use: MLServer has no types, so mypy would accept any name."""

        name: str
        version: str | None
        settings: ModelSettings
        inputs: list[Any]
        outputs: list[Any]

        def __init__(self, settings: ModelSettings) -> None: ...
else:
    from mlserver import MLModel

_PARAMETERS = ("uri", "version", "extra")  # keys of ``parameters``


class BaseRuntime(ServedModel, MLModel):
    """A runtime derives from it, declares the type of ``_slot`` and has an opener. MLServer reloads their modules only.

    ``rest_routes``: the rows of the table of paths that a server with this model has. ``extra_keys``: the keys of its
    ``parameters.extra``.
    """

    rest_routes: Sequence[RestRoute] = REST_ROUTES
    extra_keys: Collection[str] = ()
    _slot: ModelSlot[Any]

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self._state = server_state()
        patches.install(self._state)
        patches.keep_out_of_workers(settings)
        patches.keep_out_of_the_cache(settings)
        self.created = int(time.time())  # seconds since the epoch
        self._slot = ModelSlot(settings.name, self._state.lifecycle)

    @property
    def ready(self) -> bool:
        """The value that MLServer sets after the load, as long as the model has no trouble."""
        return self._loaded and self.trouble is None

    @ready.setter
    def ready(self, loaded: bool) -> None:
        self._loaded = loaded

    @property
    def trouble(self) -> str | None:
        return self._slot.trouble or (None if self._loaded else "it is loading")

    @property
    def inflight(self) -> InflightRequests:
        return self._slot.inflight

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        reply: GrpcReply | None = None
        try:
            opener = self.recorded_opener(EndpointKind.GRPC_UNARY, payload.id or "")
            reply, _ = opener.open(payload, payload.id or str(uuid4()))
            return as_response(await reply.whole())
        except RequestError as error:
            raise as_server_error(error, streaming=False) from None
        finally:
            if reply is not None:
                reply.close()

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        session: StreamSession | None = None
        try:
            opener = self.recorded_opener(EndpointKind.GRPC_STREAM)
            session = StreamSession(self.name, opener, payloads, self.inflight, read_options().stalled_reader_timeout)
            async for response in await session.open():
                yield response
        except RequestError as error:
            raise as_server_error(error, streaming=True) from None
        finally:
            # Synchronous: this block may run in a task that cannot wait, when the client has disconnected.
            if session is not None:
                session.close()

    @abstractmethod
    def opener(self, endpoint: EndpointKind) -> ReplyOpener:
        """Opens the replies to gRPC messages. Raises NotServing."""

    def observers(self, endpoint: EndpointKind) -> ModelRequestObservers:
        return ModelRequestObservers(self._state.reports, self.name, self.version, endpoint)

    def recorded_opener(self, endpoint: EndpointKind, request_id: str = "") -> ReplyOpener:
        """Records a request that the opener refuses, which our REST endpoints do themselves."""
        try:
            return self.opener(endpoint)
        except NotServing as error:
            self.observers(endpoint).refused(request_id, error)
            raise

    def _refuse_stray_settings(self) -> None:
        """Raises SettingsError for a key of model-settings.json that MLServer ignores where it stands."""
        source = source_of(self.settings)
        if source and os.path.isfile(source):
            fields = {name.rstrip("_") for name in ModelSettings.model_fields}
            elsewhere = dict.fromkeys(self.extra_keys, "parameters.extra") | dict.fromkeys(_PARAMETERS, "parameters")
            refuse_stray_keys(Path(source), fields, elsewhere)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Logs an error of the block in one line, and raises it as the error that MLServer returns for the load."""
        try:
            patches.refuse_worker_process()
            self._refuse_stray_settings()
            yield
        except (SettingsError, LoadFailed, NotServing) as error:
            place = place_of_error(error, source_of(self.settings)) if isinstance(error, SettingsError) else ""
            logger.error(f"Cannot load model '{self.name}': {log_text(f'{error}{place}')}")
            raise ModelNotLoaded(f"{error}{place}") from None
        except Exception as error:  # a defect of ours: the log gets its traceback
            logger.exception(f"Cannot load model '{self.name}'")
            raise ModelNotLoaded(f"{type(error).__name__}: {error}") from None
