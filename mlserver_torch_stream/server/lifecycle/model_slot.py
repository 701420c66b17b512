"""The slot of one model in this process: it builds the engine off the event loop, holds it and drains it at unload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.server.lifecycle.lifecycle import Drainable, Lifecycle, Member
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.work_threads import in_thread

OnDeath = Callable[[BaseException], None]


class BuiltModel(Protocol):
    """An engine that several slots may share."""

    @property
    def engine(self) -> Drainable: ...

    def give_back(self) -> bool:
        """Ends this slot's use of the engine; True if no other slot uses it, so that it must be shut down."""

    def shutdown(self) -> None:
        """Stops the engine. It blocks."""


B = TypeVar("B", bound=BuiltModel)


class ModelSlot(Member, Generic[B]):
    """Builds, holds and drains the engine of one model."""

    def __init__(self, name: str, lifecycle: Lifecycle) -> None:
        super().__init__(name)
        self._lifecycle = lifecycle
        self._built: B | None = None

    @property
    def built(self) -> B:
        """Raises NotServing."""
        if self._built is None or self.retired:
            raise NotServing(f"model '{self.name}': {self.trouble}")
        return self._built

    @property
    def trouble(self) -> str | None:
        """The reason why the model is not ready; None if it is ready."""
        if self._lifecycle.shutdown_reason is not None:
            return self._lifecycle.shutdown_reason
        if self.retired:
            return "it is unloaded"
        if self._built is None:
            return "it is loading"
        return self._built.engine.trouble

    async def load(self, build: Callable[[OnDeath], B]) -> B | None:
        """Builds the engine; returns None if an unload cancels it.

        Raises what ``build`` raises, or NotServing if a shutdown begins before it returns.

        NotServing is raised only when the listeners are closed: MLServer forgets a model whose load fails, and answers
        404, not 503, for a model that it does not know.
        """
        loop = asyncio.get_running_loop()
        self._lifecycle.join(self)
        building = in_thread(
            lambda: build(lambda error: self._lifecycle.engine_died(self.name, error, loop)), self.cancellation
        )
        building.add_done_callback(self._take)
        try:
            await self._lifecycle.unless_shutdown(asyncio.shield(building))
            if self._built is None:
                await self._lifecycle.listeners_closed.wait()
            return self.built
        except BaseException:
            self.retired = True  # an engine that is built later is given back at once
            if building.cancelled():
                return None
            self.cancellation.cancel()
            raise
        finally:
            self.settled.set()

    async def unload(self) -> B | None:
        """Gives the engine back: at once if another slot uses it, else after the last request has ended.

        Returns the engine if it was shut down.
        """
        self.retired = True
        built = self._built
        if built is None or not built.give_back():
            return None
        why = self._lifecycle.shutdown_reason or f"model '{self.name}' is being unloaded"
        await self._lifecycle.drain([self, *self._lifecycle.members(built.engine)], read_options().drain_grace, why)
        await in_thread(built.shutdown)
        self._built = self.engine = None
        return built

    def _take(self, building: asyncio.Future[B]) -> None:
        if building.cancelled() or building.exception() is not None:
            return
        built = building.result()
        if not self.retired and self._lifecycle.shutdown_reason is None:
            self._built, self.engine = built, built.engine
        elif built.give_back():
            in_thread(built.shutdown)
