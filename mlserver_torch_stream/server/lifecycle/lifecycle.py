"""From the first model to the end of the process: who is there, whether requests are wanted, and how it all ends.

Knows models only by what ``Member`` says, and nothing of MLServer: ``ending`` tells it of signals. Never reloaded by
MLServer, so that there is one of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Collection, Coroutine
from typing import Any, Protocol

from mlserver.logging import logger

from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests, OneTimeEvent
from mlserver_torch_stream.server.lifecycle.threads import in_thread

# After the aborts: for the step that runs, and for the last responses to leave.
_LAST_WORDS = 2.0
_SILENCE = 0.5


class Drainable(Protocol):
    """What a model's requests run on, as far as the end of a process has to know it."""

    @property
    def trouble(self) -> str | None:
        """Why it is not ready; None if it is."""

    def drain(self, why: str) -> None:
        """New requests are refused, with the reason; what runs goes on."""

    def abort_all(self, why: str) -> None:
        """What still runs ends now, with the reason."""

    def shutdown(self) -> None:
        """Blocks; call it off the loop."""


class Member(Protocol):
    """A model of ours, from before it is loaded until its last request has ended."""

    name: str
    visits: InflightRequests
    settled: OneTimeEvent
    """Its load has ended, well or not."""

    @property
    def engine(self) -> Drainable | None:
        """None before it is loaded."""

    @property
    def over(self) -> bool:
        """No new request can come to it."""


class Lifecycle:
    """All methods are called on the event loop's thread, but for ``engine_died``."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._leaving: str | None = None
        self._left = OneTimeEvent()
        self._impatient = OneTimeEvent()
        self._closed = OneTimeEvent()
        self.ending = False  # somebody is seeing everybody off
        self.failure: str | None = None

    @property
    def leaving(self) -> str | None:
        """Why no requests are wanted any more; None while they are."""
        return self._leaving

    def members(self, engine: Drainable | None = None) -> Collection[Member]:
        """All who are here, or those on one engine: its user, and those before whose last requests still run."""
        self._members = [member for member in self._members if not (member.over and member.visits.empty)]
        return [member for member in self._members if engine is None or member.engine is engine]

    def join(self, member: Member) -> None:
        self._members.append(member)

    async def settled(self, name: str) -> None:
        """Waits for all loads of this name."""
        for member in self.members():
            if member.name == name:
                await member.settled.wait()

    def leave(self, why: str) -> None:
        """From now on nothing here is ready; requests are still taken."""
        if self._leaving is None:
            logger.info(f"Not ready any more: {why}")
        self._leaving = self._leaving or why
        self._left.come()

    def hurry(self) -> None:
        """Whoever waits for streams to finish waits no longer."""
        self._impatient.come()

    def close(self) -> None:
        """Nobody can ask for anything any more."""
        self._closed.come()

    async def closed(self) -> None:
        await self._closed.wait()

    async def unless_leaving(self, work: Awaitable[Any]) -> None:
        """Waits for ``work``, and raises what it raises, unless the process is to end: then it is left to itself."""
        task = asyncio.ensure_future(work)
        if await _first(self._left.wait(), until=task):
            task.cancel()
        else:
            task.result()

    async def linger(self, seconds: float) -> None:
        """Lets time pass in which requests are still taken."""
        if seconds:
            await _at_most(seconds, self._impatient.wait())

    async def see_off(self, members: Collection[Member], grace: float, why: str) -> None:
        """Lets the members' requests finish for ``grace`` seconds, then ends the rest, each with its final response.

        ``why`` is what the clients of those are told, and those of requests that come too late.
        """
        for member in members:
            if member.engine is not None:
                member.engine.drain(why)
            member.visits.refusing.come()
        everybody = _all_gone(members)
        try:
            await _at_most(grace, self._unless_impatient(everybody))
            if everybody.done():
                return
            for member in members:
                member.visits.aborting.come()
                if member.engine is not None:
                    member.engine.abort_all(why)
            await _at_most(_LAST_WORDS, asyncio.shield(everybody))
        finally:
            everybody.cancel()

    async def silence(self, members: Collection[Member]) -> None:
        """Stops the engines' threads: one that still computes while the interpreter goes down may crash it."""
        ends = [in_thread(member.engine.shutdown) for member in members if member.engine is not None]
        if ends:
            await asyncio.wait(ends, timeout=_SILENCE)

    async def _unless_impatient(self, task: asyncio.Future[Any]) -> None:
        await _first(self._impatient.wait(), until=task)

    def engine_died(self, model: str, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        """An engine is dead for good: the process ends as after a signal, but with an error. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            loop.call_soon_threadsafe(self._fail, f"the engine of model '{model}' died", error)

    def _fail(self, why: str, error: BaseException) -> None:
        logger.error(f"Giving up, so that the process is started anew: {why}: {error}")
        self.failure = self.failure or why
        self.leave(why)  # which clients see: without what may be a path of a source file
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.raise_signal(signal.SIGTERM)  # MLServer handles it


def _all_gone(members: Collection[Member]) -> asyncio.Task[None]:
    async def wait() -> None:
        for member in members:
            await member.visits.none_left()

    return asyncio.create_task(wait())


async def _first(event: Coroutine[Any, Any, Any], *, until: asyncio.Future[Any]) -> bool:
    """Waits for either; True if the event came and the task is not done."""
    waiter = asyncio.create_task(event)
    try:
        await asyncio.wait((waiter, until), return_when=asyncio.FIRST_COMPLETED)
        return not until.done()
    finally:
        waiter.cancel()


async def _at_most(seconds: float, work: Awaitable[Any]) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(work, seconds)


LIFECYCLE = Lifecycle()
