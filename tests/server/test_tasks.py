"""No task is left with an exception that nobody retrieves, whatever its work raises once it is no longer needed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable

from mlserver_torch_stream.server.grpc.streams import ConcurrentReplies
from mlserver_torch_stream.server.lifecycle.lifecycle import OneTimeEvent, until


def complaints_of(scenario: Callable[[], Awaitable[None]]) -> list[str]:
    """Returns what asyncio would log."""
    said: list[str] = []

    async def listened() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        await scenario()
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(listened())
    return said


def test_a_message_whose_reading_fails_after_it_is_not_wanted_any_more() -> None:
    async def messages(reading: asyncio.Event) -> AsyncIterator[int]:
        yield 1
        reading.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("the client left")

    async def scenario() -> None:
        ended, reading = OneTimeEvent(), asyncio.Event()
        wanted = until(ended, messages(reading))
        assert await anext(wanted) == 1
        waiting = asyncio.ensure_future(anext(wanted, None))
        await reading.wait()
        ended.set()
        assert await waiting is None

    assert complaints_of(scenario) == []


def test_a_stream_that_fails_while_it_is_closed() -> None:
    """Its reader and its answers end, although nobody receives their errors."""
    ended = 0

    class Failing:
        async def bodies(self) -> AsyncIterator[str]:
            yield "first"
            try:
                yield "second"
                await asyncio.Event().wait()
            finally:
                raise ConnectionError("the client left")

        def failure(self, error: Exception) -> list[str]:
            return ["failed", "for good"]

        def close(self) -> None:
            pass

    async def messages() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("the client left")

    async def scenario() -> None:
        nonlocal ended  # a reference to the tasks would keep asyncio from complaining about them
        before = asyncio.all_tasks()
        answers: ConcurrentReplies[int, str, str] = ConcurrentReplies(
            messages(), lambda message, number: Failing(), str, 2
        )
        assert await anext(answers) == "first"
        await asyncio.sleep(0.01)
        tasks = asyncio.all_tasks() - before
        answers.close()
        done, pending = await asyncio.wait(tasks, timeout=5)
        assert not pending
        ended = len(done)

    assert complaints_of(scenario) == [] and ended == 2
