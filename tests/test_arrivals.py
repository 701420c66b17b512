"""Pieces of a prompt: a late one is a timeout, the stream's end is noticed, and its reader gets it at last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from mlserver_torch_stream.engine.api import Mailbox
from mlserver_torch_stream.errors import NotServing, TimedOut
from mlserver_torch_stream.generation import Arrivals
from mlserver_torch_stream.types import FinishReason, TokenEvent


async def _pieces(count: int, then_waits: bool) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number
    if then_waits:
        await asyncio.Event().wait()


def _run(scenario: Callable[[Mailbox], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), 1, lambda mailbox: None)
        await asyncio.wait_for(scenario(mailbox), 30)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"

    asyncio.run(bounded())


def test_after_the_last_piece_the_stream_is_its_readers() -> None:
    async def scenario(mailbox: Mailbox) -> None:
        arrivals = Arrivals(_pieces(3, then_waits=False), mailbox, 20)
        assert [await arrivals.next() for _ in range(4)] == [0, 1, 2, None]
        arrivals.close()
        reader = asyncio.ensure_future(anext(mailbox))
        await asyncio.sleep(0)
        event = TokenEvent(0, "x", finish_reason=FinishReason.STOP)
        mailbox.deliver(event)
        assert await reader == event

    _run(scenario)


def test_a_piece_that_is_late_is_a_timeout() -> None:
    async def scenario(mailbox: Mailbox) -> None:
        arrivals = Arrivals(_pieces(1, then_waits=True), mailbox, 0.3)
        assert await arrivals.next() == 0
        with pytest.raises(TimedOut, match=r"within 0\.3 s"):
            await arrivals.next()
        arrivals.close()
        arrivals.close()

    _run(scenario)


@pytest.mark.parametrize("error", [TimedOut("over"), NotServing("down"), None])
def test_the_end_of_the_stream_is_told_while_a_piece_is_waited_for(error: Exception | None) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        arrivals = Arrivals(_pieces(0, then_waits=True), mailbox, 0)
        asyncio.get_running_loop().call_later(
            0.02, mailbox.deliver, TokenEvent(0, finish_reason=FinishReason.ABORT, error=error)
        )
        with pytest.raises(type(error or NotServing(""))) as caught:
            await arrivals.next()
        assert error in (None, caught.value)
        arrivals.close()

    _run(scenario)
