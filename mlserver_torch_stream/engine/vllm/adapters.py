"""Numbers the LoRA adapters of one model in vLLM, and loads and unloads them while the model serves requests.

If the worker is restarted, the new worker loads the adapters that are loaded at that time. An adapter that it cannot
load, because its folder is gone or broken, counts as unloaded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from mlserver_torch_stream.engine.failures import VllmLost
from mlserver_torch_stream.engine.vllm.messages import Adapter
from mlserver_torch_stream.engine.vllm.vllm_batcher import VllmBatcher
from mlserver_torch_stream.engine_settings import MAX_ADAPTERS
from mlserver_torch_stream.errors import InvalidInput, LoadFailed, NotServing, RequestError, UnknownModel
from mlserver_torch_stream.types import ModelInfo

logger = logging.getLogger(__name__)


class _Shows(Protocol):
    info: ModelInfo


class LoraAdapters:
    """An ``AdapterSet``. ``numbers`` also contains adapters that are being loaded, and adapters that are being
    unloaded, because running streams still use these.
    """

    def __init__(self, modules: Mapping[str, str], batcher: Callable[[], VllmBatcher]) -> None:
        """``batcher`` returns the current batcher."""
        self.numbers = {name: number for number, name in enumerate(modules, 1)}
        self._loaded = {name: Adapter(name, self.numbers[name], path) for name, path in modules.items()}
        self._batcher = batcher
        self._last_number = len(modules)
        self._engine: _Shows | None = None
        self._showing = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._loaded)

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters that a new worker loads when it starts. Any thread may read this property."""
        return tuple(self._loaded.copy().values())

    def show_in(self, engine: _Shows) -> None:
        """Keeps the engine's ``info`` up to date from now on."""
        self._engine = engine
        self._show()

    def _show(self) -> None:
        assert self._engine is not None
        with self._showing:
            self._engine.info = replace(self._engine.info, adapters=self.names)

    def lost(self, missing: Mapping[int, str]) -> None:
        """Forgets adapters that a new worker could not load, by number with the reason. Any thread may call it."""
        for adapter in self.loaded:
            if adapter.number in missing and self._loaded.pop(adapter.name, None) is not None:
                del self.numbers[adapter.name]
                why = missing[adapter.number]
                logger.warning("The adapter %r is unloaded: vLLM could not load it again: %s", adapter.name, why)
        self._show()

    async def load(self, name: str, path: str) -> None:
        if name in self.numbers:
            raise InvalidInput("lora_name", f"an adapter {name!r} is loaded already, or is being loaded or unloaded")
        if len(self.numbers) >= MAX_ADAPTERS:
            raise InvalidInput("lora_name", f"{MAX_ADAPTERS} adapters are loaded already, which is the maximum")
        self._last_number += 1
        adapter = Adapter(name, self._last_number, path)
        self.numbers[name] = adapter.number  # at once, so that a second load of the same name is refused
        try:
            answer = self._batcher().load_adapter(adapter)
            await _answered(answer)
        except asyncio.CancelledError:
            self._hold(self._undo(adapter, answer))
            raise
        except BaseException:
            del self.numbers[name]
            raise
        self._loaded[name] = adapter
        self._show()

    async def unload(self, name: str) -> None:
        """Unloads an adapter. The unload is completed even if the caller is cancelled."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise UnknownModel(name)
        self._show()
        await asyncio.shield(self._hold(self._unload(adapter)))

    async def _undo(self, adapter: Adapter, answer: Future[None]) -> None:
        """Undoes a load whose caller was cancelled. The worker first finishes the load; until then the name
        is in use.
        """
        try:
            await _answered(answer)
        except RequestError:  # it is not loaded
            del self.numbers[adapter.name]
            return
        with suppress(RequestError):
            await self._unload(adapter)

    async def _unload(self, adapter: Adapter) -> None:
        try:
            await _answered(self._batcher().unload_adapter(adapter.name, adapter.number))
        finally:
            del self.numbers[adapter.name]

    def _hold(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _answered(answer: Future[None]) -> None:
    try:
        await asyncio.wrap_future(answer)
    except LoadFailed as error:
        raise InvalidInput("lora_path", str(error)) from None
    except VllmLost as error:
        raise NotServing(str(error)) from None
