"""The lifecycle of this process: which models it has, whether it takes requests, and how it drains them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

from mlserver.logging import logger

from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests, OneTimeEvent
from mlserver_torch_stream.work_threads import Cancellation, in_thread

# Seconds after the aborts: for the step that runs and the last responses, and for the engines' threads.
_ABORT_TIMEOUT = 2.0
_ENGINE_STOP_TIMEOUT = 0.5


class Drainable(Protocol):
    """The part of an engine, or of a pool of workers, that the lifecycle uses."""

    @property
    def trouble(self) -> str | None:
        """The reason why it is not ready; None if it is ready."""

    def drain(self, why: str) -> None:
        """Refuses new requests with this reason; running requests continue."""

    def abort_all(self, why: str) -> None:
        """Ends the running requests now, with this reason."""

    def shutdown(self) -> None:
        """Stops the engine. It blocks, so it is called off the event loop."""


class Member:
    """One model of this package, from before its load until its last request has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inflight = InflightRequests()
        self.engine: Drainable | None = None  # before the load has ended
        self.settled = OneTimeEvent()  # the load has ended, with or without success
        self.retired = False  # True: no new request can reach the model
        self.cancellation = Cancellation()  # of the load


class Lifecycle:
    """All methods are called on the event loop's thread, except ``engine_died``."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self.shutdown_reason: str | None = None  # why the process accepts no more requests; None while it does
        self._shutdown_begun = OneTimeEvent()
        self._grace_skipped = OneTimeEvent()
        self.refusing = OneTimeEvent()  # the process takes no further request
        self.listeners_closed = OneTimeEvent()  # no client can send a request any more
        self.listeners: list[Callable[[float], Awaitable[None]]] = []  # stop our own listeners, with a grace in seconds
        self.draining = False
        self.failure: str | None = None

    def members(self, engine: Drainable | None = None) -> Collection[Member]:
        """All members, or those of one engine: its present user, and earlier users with requests still in flight."""
        self._members = [member for member in self._members if not (member.retired and member.inflight.empty)]
        return [member for member in self._members if engine is None or member.engine is engine]

    def join(self, member: Member) -> None:
        self._members.append(member)

    async def settled(self, name: str) -> None:
        """Waits until all loads of this name have ended."""
        for member in self.members():
            if member.name == name:
                await member.settled.wait()

    def cancel_loads(self, name: str) -> None:
        """Cancels the loads of this name that run."""
        for member in self.members():
            if member.name == name and not member.settled.is_set:
                member.cancellation.cancel()

    def begin_shutdown(self, why: str) -> None:
        """Makes the process not ready; requests are still accepted."""
        if self.shutdown_reason is None:
            logger.info(f"Not ready any more: {why}")
        self.shutdown_reason = self.shutdown_reason or why
        self._shutdown_begun.set()

    def skip_grace(self) -> None:
        """Ends the waits for routers and for running streams."""
        self._grace_skipped.set()

    async def unless_shutdown(self, work: Awaitable[Any]) -> None:
        """Waits for ``work`` and raises its exception; returns early, without a result, when a shutdown begins."""
        task = asyncio.ensure_future(work)
        if await is_done_before(task, self._shutdown_begun):
            task.result()
        else:
            task.cancel()

    async def delay(self, seconds: float) -> None:
        """Waits while requests are still accepted, so that routers notice the failing readiness."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._grace_skipped.wait(), seconds)

    async def drain(self, members: Collection[Member], grace: float, why: str) -> None:
        """Lets the members' requests finish for ``grace`` seconds, then aborts the rest, each with its final response.

        The clients of aborted and of late requests get ``why`` as the reason.
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
        """Stops the engines' threads: a thread that computes while the interpreter shuts down may crash the process."""
        stops = [in_thread(member.engine.shutdown) for member in members if member.engine is not None]
        if stops:
            await asyncio.wait(stops, timeout=_ENGINE_STOP_TIMEOUT)

    async def stop_listeners(self, grace: float) -> None:
        """Closes our own listeners; calls that still run have ``grace`` seconds."""
        await asyncio.gather(*(stop(grace) for stop in self.listeners))

    def engine_died(self, model: str, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the process as after a signal, but with an error: this engine cannot be restarted. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the process has ended already
            loop.call_soon_threadsafe(self._fail, f"the engine of model '{model}' died", error)

    def _fail(self, why: str, error: BaseException) -> None:
        logger.error(f"Giving up, so that the process is restarted: {why}: {error}")
        self.failure = self.failure or why
        self.begin_shutdown(why)  # clients see this text, so the error, which may name a source file, is not in it
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.raise_signal(signal.SIGTERM)  # MLServer handles it


async def _wait_until_empty(members: Collection[Member]) -> None:
    for member in members:
        await member.inflight.wait_until_empty()


async def is_done_before(task: asyncio.Future[Any], event: OneTimeEvent, timeout: float | None = None) -> bool:
    """Waits for the task, but no longer than until the event or for ``timeout`` seconds."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiter), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiter.cancel()
