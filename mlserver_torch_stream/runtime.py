"""The MLServer runtime for language models: loads a model and connects its engine to the endpoints.

MLServer may reload this module at any time, so it holds no state.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlserver import ModelSettings
from mlserver.logging import logger

from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.loading import build, resolve
from mlserver_torch_stream.protocol.seldon_spelling import warning_of_name
from mlserver_torch_stream.protocol.spelling import PromptSpelling
from mlserver_torch_stream.protocol.v2_reply import input_metadata, output_metadata
from mlserver_torch_stream.server.base_runtime import BaseRuntime
from mlserver_torch_stream.server.host import source_of
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.observability.request_log import EndpointKind
from mlserver_torch_stream.server.served_model import RestRequest, TokenModel
from mlserver_torch_stream.server.streams.prompt_reply import PromptReply
from mlserver_torch_stream.server.streams.token_reply import TokenOpener, TokenReply
from mlserver_torch_stream.settings import KNOWN_KEYS
from mlserver_torch_stream.work_threads import in_thread

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.build import BuiltEngine


class TorchStreamRuntime(BaseRuntime, TokenModel):
    """Streams the tokens of a Hugging Face causal language model."""

    _slot: ModelSlot[BuiltEngine]
    extra_keys = KNOWN_KEYS

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.inputs = input_metadata()
        self.outputs = output_metadata()

    async def load(self) -> bool:
        with self._loading():
            resolved = resolve(self.settings, source_of(self.settings))
            built = await self._slot.load(partial(build, resolved, f"{self.name}/{self.version or ''}"))
        if built is None:
            logger.info(f"Model '{self.name}': its load was cancelled, because it is being unloaded")
            return False
        self._state.engine_metrics.add(self.name, self.version, built.engine.stats)
        # Every metric of the model is exported from now on, at 0.
        self._state.request_metrics.of(self.name, self.version)
        logger.info(f"Model '{self.name}': {built.summary}{resolved.summary}")
        warning = warning_of_name(self.name)
        if warning is not None:
            logger.warning(f"Model '{self.name}': {warning}")
        return True

    async def unload(self) -> bool:
        built = await self._slot.unload()
        if built is not None:
            from mlserver_torch_stream.engine.build import reclaim_memory

            self._state.engine_metrics.remove(self.name, self.version, built.engine.stats)
            del built
            await in_thread(reclaim_memory)
        return True

    def generator(self, endpoint: EndpointKind) -> Generator:
        built = self._slot.built
        return Generator(built.engine, built.codec, built.engine.info, self.observers(endpoint))

    def reply(self, request: RestRequest) -> TokenReply | PromptReply:
        generator, posted, spelling = self.generator(request.endpoint), request.posted, request.spelling
        streaming, request_id = request.streaming, request.request_id
        decoded = spelling.decode(posted, generator.info, streaming=streaming, request_id=request_id)
        if isinstance(spelling, PromptSpelling):
            return PromptReply(request_id, partial(generator.answer, decoded, spelling.answer))
        context = request.context(decoded.request_id)
        return TokenReply(decoded, spelling, context, partial(generator.start, decoded), posted)

    def opener(self, endpoint: EndpointKind) -> TokenOpener:
        return TokenOpener(self.generator(endpoint), self.name, self.version)
