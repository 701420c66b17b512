"""One model's stay in this process: its engine is built off the loop, is there or not, and is seen off at the end.

Knows nothing of settings or requests: it is given what builds an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests, OneTimeEvent
from mlserver_torch_stream.server.lifecycle.lifecycle import LIFECYCLE, Drainable
from mlserver_torch_stream.server.lifecycle.threads import in_thread
from mlserver_torch_stream.server.options import read_options

OnDeath = Callable[[BaseException], None]


class BuiltModel(Protocol):
    """An engine that may have other users."""

    @property
    def engine(self) -> Drainable: ...

    def give_back(self) -> bool:
        """True if nobody else uses the engine, nor ever will: then it is to be shut down."""

    def shutdown(self) -> None:
        """Blocks."""


B = TypeVar("B", bound=BuiltModel)


class ModelSlot(Generic[B]):
    """A ``Member`` of the lifecycle."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.visits = InflightRequests()
        self.settled = OneTimeEvent()
        self.over = False
        self._built: B | None = None

    @property
    def engine(self) -> Drainable | None:
        return None if self._built is None else self._built.engine

    @property
    def built(self) -> B:
        """Raises NotServing."""
        if self._built is None or self.over:
            raise NotServing(f"model '{self.name}': {self.trouble}")
        return self._built

    @property
    def trouble(self) -> str | None:
        """Why the model is not ready; None if it is."""
        if LIFECYCLE.leaving is not None:
            return LIFECYCLE.leaving
        if self.over:
            return "it is unloaded"
        if self._built is None:
            return "it is loading"
        return self._built.engine.trouble

    async def begin(self, build: Callable[[OnDeath], B]) -> B:
        """Builds the engine. Raises what ``build`` does, or NotServing if the process is to end before it is done.

        But not before nobody can ask any more: MLServer forgets a model whose load fails, and one that it does not know
        is 404, not 503.
        """
        loop = asyncio.get_running_loop()
        LIFECYCLE.join(self)
        building = in_thread(lambda: build(lambda error: LIFECYCLE.engine_died(self.name, error, loop)))
        building.add_done_callback(self._take)
        try:
            await LIFECYCLE.unless_leaving(asyncio.shield(building))
            if self._built is None:
                await LIFECYCLE.closed()
            return self.built
        except BaseException:
            self.over = True  # what is built too late is given back at once
            raise
        finally:
            self.settled.come()

    async def end(self) -> B | None:
        """Gives the engine back: at once where a successor goes on with it, else when the last request has ended.

        Returns what was shut down, if so.
        """
        self.over = True
        built = self._built
        if built is None or not built.give_back():
            return None
        why = LIFECYCLE.leaving or f"model '{self.name}' is being unloaded"
        await LIFECYCLE.see_off([self, *LIFECYCLE.members(built.engine)], read_options().drain_grace, why)
        await in_thread(built.shutdown)
        self._built = None
        return built

    def _take(self, building: asyncio.Future[B]) -> None:
        if building.cancelled() or building.exception() is not None:
            return
        built = building.result()
        if not self.over and LIFECYCLE.leaving is None:
            self._built = built
        elif built.give_back():
            in_thread(built.shutdown)
