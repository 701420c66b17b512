"""The MLServer runtime for language models: loads a model and unloads it.

MLServer may reload this module at any time, so it holds no state.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from mlserver import ModelSettings
from mlserver.logging import logger
from mlserver.types import MetadataModelResponse, Parameters

from mlserver_torch_stream.errors import NotServing, SettingsError
from mlserver_torch_stream.loading import build, resolve
from mlserver_torch_stream.protocol.seldon_spelling import warning_of_name
from mlserver_torch_stream.protocol.v2_reply import input_metadata, output_metadata
from mlserver_torch_stream.server.base_runtime import BaseRuntime
from mlserver_torch_stream.server.host import source_of
from mlserver_torch_stream.server.lifecycle.lifecycle import ModelSlot
from mlserver_torch_stream.server.token_model import TokenModel
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

    async def metadata(self) -> MetadataModelResponse:
        metadata: MetadataModelResponse = await super().metadata()
        given = {} if metadata.parameters is None else metadata.parameters.model_dump()
        if self.adapters is not None:
            given["lora_adapters"] = ",".join(sorted(self.adapter_names))
        with suppress(NotServing):  # while there is no engine, only what the settings say is known
            given["attention"] = self._slot.built.engine.info.attention
        metadata.parameters = Parameters(**given) if given else None
        return metadata

    async def load(self) -> bool:
        with self._loading():
            resolved = resolve(self.settings, source_of(self.settings))
            self._slot.adapters = frozenset(resolved.settings.lora_modules or {})
            self._refuse_taken_names()
            built = await self._slot.load(partial(build, resolved, f"{self.name}/{self.version or ''}"))
        if built is None:
            logger.info(f"Model '{self.name}': its load was cancelled, because it is being unloaded")
            return False
        self._state.engine_metrics.add(self.name, self.version, built.engine.stats, built.engine.info.attention)
        # Every metric of the model is exported from now on, at 0.
        self._state.request_metrics.of(self.name, self.version)
        logger.info(f"Model '{self.name}': {built.summary}{resolved.summary}")
        warning = warning_of_name(self.name)
        if warning is not None:
            logger.warning(f"Model '{self.name}': {warning}")
        return True

    def _refuse_taken_names(self) -> None:
        """Raises SettingsError if requests could not tell an adapter from a model, or from another model's adapter."""
        if self.name in self._slot.adapters:
            raise SettingsError(f"parameters.extra.lora_modules: {self.name} is the name of the model itself")
        for other in self._state.lifecycle.members():
            if other.retired or other.name == self.name:
                continue
            if taken := self._slot.adapters & {other.name, *other.adapters}:
                raise SettingsError(
                    f"parameters.extra.lora_modules: {min(taken)} is the name of model {other.name} or of its adapter"
                )
            if self.name in other.adapters:
                raise SettingsError(f"name: {self.name} is the name of an adapter of model {other.name}")

    async def unload(self) -> bool:
        built = await self._slot.unload()
        if built is not None:
            from mlserver_torch_stream.engine.build import reclaim_memory

            self._state.engine_metrics.remove(self.name, self.version, built.engine.stats)
            del built
            await in_thread(reclaim_memory)
        return True
