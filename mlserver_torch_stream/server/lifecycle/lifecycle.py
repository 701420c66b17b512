"""Manages the lifecycle of this process: its models and their requests in flight, and how models load and drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from mlserver.logging import logger

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.work_threads import Cancellation, in_thread

T = TypeVar("T")


class OneTimeEvent:
    """An event that is set once and never cleared. Unlike asyncio's, it can be awaited on any event loop."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        """Sets the event, and wakes all that wait for it. Idempotent."""
        self.is_set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Waits until the event is set."""
        if self.is_set:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


class InflightRequests:
    """Counts requests from their arrival until their last byte is handed to the transport.

    Once ``refusing`` is set, new requests are refused and running ones may finish; once ``aborting`` is set, running
    requests end at once.
    """

    def __init__(self) -> None:
        self.refusing = OneTimeEvent()
        self.aborting = OneTimeEvent()
        self._count = 0
        self._emptied = OneTimeEvent()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Counts one request as in flight while the ``with`` block runs."""
        self.began()
        try:
            yield
        finally:
            self.ended()

    def began(self) -> None:
        """Counts one more request."""
        self._count += 1

    def ended(self) -> None:
        """Called at the end of a request that was counted."""
        self._count -= 1
        if self._count == 0:
            self._emptied.set()
            self._emptied = OneTimeEvent()

    @property
    def empty(self) -> bool:
        """Whether no request is in flight."""
        return self._count == 0

    async def wait_until_empty(self) -> None:
        """Waits until no request is in flight."""
        while self._count:
            await self._emptied.wait()


async def until(ended: OneTimeEvent, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yields the items until ``ended`` is set. Stops at once, even while it is waiting for an item."""
    end = asyncio.create_task(ended.wait())
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(items))
            await asyncio.wait((end, following), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        # Synchronous, because this block may run in a task that can no longer await.
        end.cancel()
        if following is not None:
            following.add_done_callback(_retrieve_exception)  # a read from a disconnected client may raise
            following.cancel()


def _retrieve_exception(task: asyncio.Future[T]) -> None:
    """Keeps asyncio from logging the exception of a task that no one awaits."""
    if not task.cancelled():
        task.exception()


_ABORT_TIMEOUT = 2.0  # seconds for the running step and the last responses after an abort
_ENGINE_STOP_TIMEOUT = 0.5  # seconds for the engines' threads to end


class Drainable(Protocol):
    """The part of an engine, or of a pool of workers, that the lifecycle uses."""

    @property
    def trouble(self) -> str | None:
        """The reason why the engine is not ready; None if it is ready."""

    def drain(self, why: str) -> None:
        """Refuses new requests, and gives ``why`` as the reason; running requests continue."""

    def abort_all(self, why: str) -> None:
        """Ends the running requests at once, and gives ``why`` as the reason."""

    def shutdown(self) -> None:
        """Stops the engine. It blocks, so it is called in a thread."""


class Member:
    """One model of this package, from before its load until its last request has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inflight = InflightRequests()
        self.engine: Drainable | None = None  # None until the load has ended
        self.adapters: frozenset[str] = frozenset()  # the names of the adapters in the model's settings
        self.settled = OneTimeEvent()  # set when the load has ended, successfully or not
        self.retired = False  # True: no new request can reach the model
        self.cancellation = Cancellation()  # cancels the load


class Lifecycle:
    """The models of this process and its shutdown. All methods but ``engine_died`` run on the event loop's thread."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self.shutdown_reason: str | None = None  # the reason for the shutdown; None before it begins
        self._shutdown_begun = OneTimeEvent()
        self._grace_skipped = OneTimeEvent()
        self.refusing = OneTimeEvent()  # set when the process accepts no further request
        self.listeners_closed = OneTimeEvent()  # set once no client can send a request
        self.listeners: list[Callable[[float], Awaitable[None]]] = []  # stop our own ports, given a grace in seconds
        self.draining = False
        self.failure: str | None = None

    def members(self, engine: Drainable | None = None) -> Collection[Member]:
        """Returns all members, or only those of one engine. Members include earlier ones that still have requests in
        flight.
        """
        self._members = [member for member in self._members if not (member.retired and member.inflight.empty)]
        return [member for member in self._members if engine is None or member.engine is engine]

    def join(self, member: Member) -> None:
        """Adds a model, before its load."""
        self._members.append(member)

    async def settled(self, name: str) -> None:
        """Waits until all loads of models with this name have ended."""
        for member in self.members():
            if member.name == name:
                await member.settled.wait()

    def cancel_loads(self, name: str) -> None:
        """Cancels the running loads of models with this name."""
        for member in self.members():
            if member.name == name and not member.settled.is_set:
                member.cancellation.cancel()

    def begin_shutdown(self, why: str) -> None:
        """Makes the process not ready; requests are still accepted."""
        if self.shutdown_reason is None:
            logger.info(f"No longer ready: {why}")
        self.shutdown_reason = self.shutdown_reason or why
        self._shutdown_begun.set()

    def skip_grace(self) -> None:
        """Ends the waiting times of a shutdown, both the one for routers and the one for running streams."""
        self._grace_skipped.set()

    async def unless_shutdown(self, work: Awaitable[Any]) -> None:
        """Waits for ``work``, and raises its exception; returns early, without a result, if a shutdown begins."""
        task = asyncio.ensure_future(work)
        if await is_done_before(task, self._shutdown_begun):
            task.result()
        else:
            task.cancel()

    async def delay(self, seconds: float) -> None:
        """Waits ``seconds`` seconds, in which requests are still accepted, so that routers can notice that the server
        is not ready. With 0 the event loop has no turn, so that no client sees a server that is not ready and accepts
        requests.
        """
        if seconds:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._grace_skipped.wait(), seconds)

    async def drain(self, members: Collection[Member], grace: float, why: str) -> None:
        """Gives the members' requests ``grace`` seconds to finish, then aborts those that remain. Each still gets its
        final response.

        Clients whose requests are aborted or arrive later are told ``why``.
        """
        for member in members:
            if member.engine is not None:
                member.engine.drain(why)
            member.inflight.refusing.set()
        all_ended = asyncio.create_task(_wait_until_empty(members))
        try:
            if await is_done_before(all_ended, self._grace_skipped, grace):
                return
            for member in members:
                member.inflight.aborting.set()
                if member.engine is not None:
                    member.engine.abort_all(why)
            await asyncio.wait((all_ended,), timeout=_ABORT_TIMEOUT)
        finally:
            all_ended.cancel()

    async def stop_engines(self, members: Collection[Member]) -> None:
        """Stops the engines' threads: a thread that computes while the interpreter exits may crash the process."""
        stops = [in_thread(member.engine.shutdown) for member in members if member.engine is not None]
        if stops:
            await asyncio.wait(stops, timeout=_ENGINE_STOP_TIMEOUT)

    async def stop_listeners(self, grace: float) -> None:
        """Closes our own ports; running calls have ``grace`` seconds to end."""
        await asyncio.gather(*(stop(grace) for stop in self.listeners))

    def engine_died(self, model: str, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        """Shuts the process down with an error, because an engine cannot be restarted. May be called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the process has ended already
            loop.call_soon_threadsafe(self._fail, f"the engine of model '{model}' died", error)

    def _fail(self, why: str, error: BaseException) -> None:
        logger.error(f"Ending the process, so that it is restarted: {why}: {error}")
        self.failure = self.failure or why
        self.begin_shutdown(why)  # clients see this text, so it omits the error, which may name a source file
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.raise_signal(signal.SIGTERM)  # MLServer handles it


async def _wait_until_empty(members: Collection[Member]) -> None:
    for member in members:
        await member.inflight.wait_until_empty()


async def is_done_before(task: asyncio.Future[Any], event: OneTimeEvent, timeout: float | None = None) -> bool:
    """Waits for the task, the event or ``timeout`` seconds. Returns whether the task is done."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiter), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiter.cancel()


OnDeath = Callable[[BaseException], None]


class BuiltModel(Protocol):
    """An engine that several slots may share."""

    @property
    def engine(self) -> Drainable: ...

    def give_back(self) -> bool:
        """Ends this slot's use of the engine. Returns True if no other slot uses the engine, which must then be shut
        down.
        """

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
        """The built model. Raises NotServing if the model is not ready."""
        if self._built is None or self.retired:
            raise NotServing(f"model '{self.name}': {self.trouble}")
        return self._built

    @property
    def trouble(self) -> str | None:
        """The reason why the model is not ready; None if it is ready."""
        if self._lifecycle.shutdown_reason is not None:
            return self._lifecycle.shutdown_reason
        if self.retired:
            return "it was unloaded"
        if self._built is None:
            return "it is loading"
        return self._built.engine.trouble

    async def load(self, build: Callable[[OnDeath], B]) -> B | None:
        """Builds the engine; returns None if an unload cancels the load.

        Raises the errors of ``build``, or NotServing if a shutdown begins before ``build`` returns. NotServing is
        raised only after the listeners are closed, because MLServer forgets a model whose load fails, and would then
        answer 404 instead of 503.
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
            self.retired = True  # if the build still ends, its engine is given back at once
            if building.cancelled():
                return None
            self.cancellation.cancel()
            raise
        finally:
            self.settled.set()

    async def unload(self) -> B | None:
        """Ends the use of the engine. If no other slot uses it, waits for the last request and shuts it down.

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
