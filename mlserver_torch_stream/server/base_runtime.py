"""The base class of our runtimes: it patches MLServer, reports a failed load in one line, and answers gRPC calls."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
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
from mlserver_torch_stream.server.grpc.streams import StreamSession
from mlserver_torch_stream.server.host import source_of
from mlserver_torch_stream.server.lifecycle.lifecycle import ModelSlot
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.request import MessageRequest, Reply, Request, ServedModel
from mlserver_torch_stream.server.state import server_state
from mlserver_torch_stream.server.status import ModelNotLoaded, as_server_error
from mlserver_torch_stream.settings_file import place_of_error, refuse_stray_keys

if TYPE_CHECKING:

    class MLModel:
        """The part of MLServer's class that our runtimes use. MLServer has no types, so mypy would accept any name."""

        name: str
        version: str | None
        settings: ModelSettings
        inputs: list[Any]
        outputs: list[Any]

        def __init__(self, settings: ModelSettings) -> None: ...

        async def metadata(self) -> Any: ...
else:
    from mlserver import MLModel

_PARAMETERS = ("uri", "version", "extra")  # keys of ``parameters``


class BaseRuntime(ServedModel, MLModel):
    """The base class of a runtime, which declares the type of ``_slot``.

    Runtimes are in separate modules, because MLServer reloads the module of the class that it instantiates.
    ``rest_routes`` are the REST paths that this model adds to a server. ``extra_keys`` are the keys that are allowed in
    ``parameters.extra``.
    """

    rest_routes: Sequence[RestRoute] = REST_ROUTES
    extra_keys: Collection[str] = ()

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self._state = server_state()
        self._reports = self._state.reports
        patches.install(self._state)
        patches.keep_out_of_workers(settings)
        patches.keep_out_of_the_cache(settings)
        self.created = int(time.time())  # seconds since the epoch
        self._slot = ModelSlot(settings.name, self._state.lifecycle)

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answers gRPC's ``ModelInfer`` with one whole response."""
        request_id = payload.id or str(uuid4())
        request: Request[Reply] = Request(self._state.lifecycle, EndpointKind.GRPC_UNARY, request_id, self)
        with _answering(request):
            request.reply = self.message_reply(MessageRequest(payload, request_id, request.kind))
            return as_response(await request.reply.whole())

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        """Answers gRPC's ``ModelStreamInfer``: yields the responses to the messages of the stream."""
        request: Request[Reply] = Request(self._state.lifecycle, EndpointKind.GRPC_STREAM, model=self)
        session = StreamSession(request, self, payloads, self._state.options.stalled_reader_timeout)
        with closing(session), _answering(request):
            async for response in await session.open():
                yield response

    def _refuse_stray_settings(self) -> None:
        """Raises SettingsError for a key that is in a place in model-settings.json where MLServer ignores it."""
        source = source_of(self.settings)
        if source and os.path.isfile(source):
            fields = {name.rstrip("_") for name in ModelSettings.model_fields}
            elsewhere = dict.fromkeys(self.extra_keys, "parameters.extra") | dict.fromkeys(_PARAMETERS, "parameters")
            refuse_stray_keys(Path(source), fields, elsewhere)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Logs an error of the ``with`` block in one line, and raises it as ModelNotLoaded, which makes MLServer's load
        fail.
        """
        try:
            patches.refuse_worker_process()
            self._refuse_stray_settings()
            yield
        except (SettingsError, LoadFailed, NotServing) as error:
            place = place_of_error(error, source_of(self.settings)) if isinstance(error, SettingsError) else ""
            logger.error(f"Cannot load model '{self.name}': {log_text(f'{error}{place}')}")
            raise ModelNotLoaded(f"{error}{place}") from None
        except Exception as error:  # a bug: the log gets its traceback
            logger.exception(f"Cannot load model '{self.name}'")
            raise ModelNotLoaded(f"{type(error).__name__}: {error}") from None


@contextmanager
def _answering(request: Request[Reply]) -> Iterator[None]:
    """Turns an error of the ``with`` block into MLServer's error, and closes the reply at the end.

    It is synchronous, because after a disconnect it may run in a task that can no longer await.
    """
    try:
        yield
    except Exception as error:
        request.record(error)
        if isinstance(error, RequestError):
            raise as_server_error(error, streaming=request.kind.streams) from None
        raise
    finally:
        request.close()
