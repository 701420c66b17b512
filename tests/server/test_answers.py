"""Merging the answers to many messages: bounded, complete, failing one by one, and closed without waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from mlserver_torch_stream.server.grpc.streams import ConcurrentReplies

_BOUND_S = 60


class Script:
    """An answer that counts to ``count`` and then ends or raises ``error``; it waits for ``gate`` at every step."""

    def __init__(self, name: int, count: int = 3, error: BaseException | None = None) -> None:
        self.name = name
        self.count = count
        self.error = error
        self.closed = False
        self.gate: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)

    async def bodies(self) -> AsyncIterator[str]:
        for step in range(self.count):
            await self.gate()
            yield f"{self.name}.{step}"
        if self.error is not None:
            raise self.error

    def failure(self, error: Exception) -> Sequence[str]:
        return [f"{self.name} failed: {error}"]

    def close(self) -> None:
        self.closed = True


async def _messages(scripts: Sequence[Script]) -> AsyncIterator[Script]:
    for script in scripts:
        yield script


def _merged(scripts: Sequence[Script], most_open: int = 8) -> list[str]:
    return _collect(_messages(scripts), most_open)


def _collect(messages: AsyncIterator[Script], most_open: int) -> list[str]:
    async def collect() -> list[str]:
        answers = ConcurrentReplies(messages, lambda script, index: script, str, most_open)
        try:
            return [reply async for reply in answers]
        finally:
            answers.close()

    return asyncio.run(asyncio.wait_for(collect(), _BOUND_S))


@pytest.mark.parametrize("most_open", [1, 2, 100])
def test_every_reply_comes_once_and_in_its_answers_order(most_open: int) -> None:
    merged = _merged([Script(name, count=name) for name in range(6)], most_open)
    for name in range(6):
        own = [reply for reply in merged if reply.startswith(f"{name}.")]
        assert own == [f"{name}.{step}" for step in range(name)]
    assert len(merged) == sum(range(6))


def test_replies_come_in_the_order_in_which_they_were_made_also_to_a_reader_that_lags() -> None:
    """A reply does not overtake one that waits for the reader, which would swap two requests of one sequence."""
    made: list[str] = []
    scripts = [Script(name, 1) for name in range(32)]

    def gate(name: int) -> Callable[[], Awaitable[object]]:
        async def wait() -> None:
            for _ in range(1 + name * 2):
                await asyncio.sleep(0)
            made.append(f"{name}.0")

        return wait

    async def collect() -> list[str]:
        found: list[str] = []
        async for reply in ConcurrentReplies(_messages(scripts), lambda script, index: script, str, 32):
            found.append(reply)
            for _ in range(name_of(reply) % 5):
                await asyncio.sleep(0)
        return found

    def name_of(reply: str) -> int:
        return int(reply.partition(".")[0])

    for script in scripts:
        script.gate = gate(script.name)
    assert asyncio.run(asyncio.wait_for(collect(), _BOUND_S)) == made and len(made) == 32


def test_no_more_than_the_bound_are_open_nor_read_ahead() -> None:
    read: list[Script] = []
    most: list[int] = []

    async def messages() -> AsyncIterator[Script]:
        for name in range(9):
            read.append(Script(name))
            yield read[-1]

    async def collect() -> None:
        async for _ in ConcurrentReplies(messages(), lambda script, index: script, str, 3):
            most.append(sum(not script.closed for script in read))

    asyncio.run(asyncio.wait_for(collect(), _BOUND_S))
    assert len(read) == 9 and max(most) <= 3


def test_an_answer_that_fails_beside_others_fails_alone() -> None:
    merged = _merged([Script(0, 5), Script(1, 1, ValueError("bad")), Script(2, 5)])
    assert "1 failed: bad" in merged
    assert len(merged) == 5 + 2 + 5


def test_an_only_answer_that_fails_before_its_first_reply_fails_the_stream() -> None:
    with pytest.raises(ValueError, match="bad"):
        _merged([Script(0, 0, ValueError("bad"))])


def test_an_answer_that_fails_after_its_first_reply_ends_with_its_failure() -> None:
    assert _merged([Script(0, 1, ValueError("bad"))]) == ["0.0", "0 failed: bad"]


def test_a_cancellation_inside_an_answer_becomes_an_ordinary_failure() -> None:
    merged = _merged([Script(0, 1, asyncio.CancelledError()), Script(1, 2)])
    assert [reply for reply in merged if reply.startswith("0 failed")] and "1.1" in merged
    with pytest.raises(RuntimeError, match="cancelled"):
        _merged([Script(0, 0, asyncio.CancelledError())])


def test_a_failing_source_of_messages_fails_the_stream() -> None:
    async def messages() -> AsyncIterator[Script]:
        yield Script(0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        _collect(messages(), 2)


def test_close_closes_every_answer_at_once_and_leaves_no_task_behind() -> None:
    scripts = [Script(name, 1000) for name in range(4)]

    async def messages() -> AsyncIterator[Script]:
        for script in scripts:
            yield script
        await asyncio.Event().wait()  # the client keeps its side open

    async def leave_early() -> set[Any]:
        before = asyncio.all_tasks()
        answers = ConcurrentReplies(messages(), lambda script, index: script, str, 8)
        async for reply in answers:
            if reply.startswith("3."):
                break
        answers.close()
        assert all(script.closed for script in scripts)
        answers.close()
        for _ in range(3):
            await asyncio.sleep(0)
        return asyncio.all_tasks() - before

    assert asyncio.run(asyncio.wait_for(leave_early(), _BOUND_S)) == set()


def test_a_reader_that_lags_makes_the_answers_wait() -> None:
    script = Script(0, 1000)
    steps = 0

    async def count() -> None:
        nonlocal steps
        steps += 1
        await asyncio.sleep(0)

    async def lag() -> None:
        script.gate = count
        answers = ConcurrentReplies(_messages([script]), lambda script, index: script, str, 1)
        await anext(answers)
        for _ in range(100):
            await asyncio.sleep(0)
        answers.close()

    asyncio.run(asyncio.wait_for(lag(), _BOUND_S))
    assert steps <= 4


def test_a_loop_that_shuts_down_under_an_open_stream_does_not_hang() -> None:
    async def forget() -> ConcurrentReplies[Script, str, str]:
        answers = ConcurrentReplies(_messages([Script(0, 1000)]), lambda script, index: script, str, 1)
        await anext(answers)
        await asyncio.sleep(0)
        return answers

    loop = threading.Thread(target=lambda: asyncio.run(forget()), daemon=True)
    loop.start()
    loop.join(_BOUND_S)
    assert not loop.is_alive()
