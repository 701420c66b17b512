"""The MLServer runtime: loads a model, hands requests to its engine and responses back.

Knows nothing of tokens or tensors, and of MLServer's servers only what ``server`` mends. MLServer may reload this
module at any time, so it holds no state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from mlserver import ModelSettings
from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse

from mlserver_torch_stream.errors import NotServing, RequestError
from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.loading import build, reclaim_memory, resolve
from mlserver_torch_stream.protocol.v2_metadata import input_metadata, output_metadata
from mlserver_torch_stream.protocol.v2_outputs import as_response
from mlserver_torch_stream.server.lifecycle.base_runtime import BaseRuntime
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.lifecycle.threads import in_thread
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.process_state import ENGINE_METRICS, REQUEST_METRICS
from mlserver_torch_stream.server.status import as_server_error
from mlserver_torch_stream.server.streams.stream_session import StreamSession
from mlserver_torch_stream.server.streams.token_opener import TokenOpener
from mlserver_torch_stream.server.streams.token_reply import TokenReply

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.factory import BuiltEngine


class TorchStreamRuntime(BaseRuntime):
    """Streams the tokens of a Hugging Face causal language model."""

    _slot: ModelSlot[BuiltEngine]

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.inputs = input_metadata()
        self.outputs = output_metadata()

    async def load(self) -> bool:
        with self._loading():
            resolved = resolve(self.settings)
            built = await self._slot.load(partial(build, resolved, f"{self.name}/{self.version or ''}"))
        ENGINE_METRICS.add(self.name, self.version, built.engine.stats)
        REQUEST_METRICS.of(self.name, self.version)  # all figures are there from now on, at 0
        logger.info(f"Model '{self.name}': {built.summary}{resolved.summary}")
        return True

    async def unload(self) -> bool:
        built = await self._slot.unload()
        if built is not None:
            ENGINE_METRICS.remove(self.name, self.version, built.engine.stats)
            del built
            await in_thread(reclaim_memory)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        reply: TokenReply | None = None
        try:
            opener = self._opener(EndpointKind.GRPC_UNARY, payload.id or "")
            reply = opener.unary(payload, payload.id or str(uuid4()))
            return as_response(await reply.whole())
        except RequestError as error:
            raise as_server_error(error, streaming=False) from None
        finally:
            if reply is not None:
                reply.close()

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        session: StreamSession | None = None
        try:
            options = read_options()
            opener = self._opener(EndpointKind.GRPC_STREAM, piece_timeout=options.piece_timeout)
            session = StreamSession(self.name, opener, payloads, self.inflight, options.stalled_reader_timeout)
            async for response in await session.open():
                yield response
        except RequestError as error:
            raise as_server_error(error, streaming=True) from None
        finally:
            # Synchronous: this may run in a task that cannot wait, when the client has left.
            if session is not None:
                session.close()

    def generator(self, entrance: EndpointKind) -> Generator:
        """Turns requests into token streams. Raises NotServing."""
        built = self._slot.built
        return Generator(built.engine, built.codec, built.engine.info, self._watcher(entrance))

    def _opener(self, entrance: EndpointKind, request_id: str = "", piece_timeout: float = 0.0) -> TokenOpener:
        """For gRPC, where no endpoint records that there is no generator. Raises NotServing."""
        try:
            generator = self.generator(entrance)
        except NotServing as error:
            self._watcher(entrance).refused(request_id, error)
            raise
        return TokenOpener(generator, self.name, self.version, piece_timeout)

    def _watcher(self, entrance: EndpointKind) -> ModelRequestObservers:
        return ModelRequestObservers(self.name, self.version, entrance)
