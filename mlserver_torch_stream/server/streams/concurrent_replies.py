"""Answers the messages of one stream concurrently, and merges the replies in the order in which they are made."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Generic, Protocol, TypeVar

Message = TypeVar("Message")
Body = TypeVar("Body")
Body_co = TypeVar("Body_co", covariant=True)
Response = TypeVar("Response")


class MessageReply(Protocol[Body_co]):
    """The reply to one message."""

    def bodies(self) -> AsyncIterator[Body_co]: ...

    def failure(self, error: Exception) -> Sequence[Body_co]:
        """The last bodies of a reply that failed while other replies go on."""

    def close(self) -> None:
        """Cancels the work for this reply. Synchronous and idempotent."""


class ConcurrentReplies(Generic[Message, Body, Response]):
    """Reads messages, opens at most ``most_open`` replies at a time, and yields the bodies of all, converted.

    One task reads and one task per message answers; each is held here until it has ended. A task waits while its last
    item is not the first in the outbox, so it has at most two items there. So the tasks wait for a reader that lags,
    and token streams merge their events meanwhile. ``close`` is synchronous because clean-up may run in a task that
    cannot wait.
    """

    def __init__(
        self,
        messages: AsyncIterator[Message],
        answer: Callable[[Message, int], MessageReply[Body]],
        convert: Callable[[Body], Response],
        most_open: int,
    ) -> None:
        self._messages = messages
        self._answer = answer
        self._convert = convert
        self._slots = asyncio.Semaphore(most_open)
        self._loop = asyncio.get_running_loop()
        # Items, each with the future that its task awaits; None if the outbox was empty.
        self._outbox: deque[tuple[Response | Exception | None, asyncio.Future[None] | None]] = deque()
        self._arrival: asyncio.Future[None] | None = None  # of the reader that waits for an item
        self._open: dict[asyncio.Task[None], MessageReply[Body]] = {}
        self._received = 0
        self._replied = False
        self._closed = False
        self._reader = asyncio.create_task(self._read())

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        while not self._outbox:
            self._arrival = self._loop.create_future()
            await self._arrival
        item, _ = self._outbox.popleft()
        if self._outbox:
            _resolve(self._outbox[0][1])
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._closed = True
        self._outbox.clear()
        self._reader.cancel()
        for task, answer in tuple(self._open.items()):
            answer.close()
            task.cancel()

    async def _read(self) -> None:
        try:
            await self._slots.acquire()
            async for message in self._messages:
                answer = self._answer(message, self._received)
                self._received += 1
                self._start(answer, self._pump(answer))
                await self._slots.acquire()
            while self._open:
                await asyncio.wait(self._open)
            await self._put(None)
        except Exception as error:
            if not self._closed:  # else no reader takes the item, and the task would never end
                await self._put(error)

    async def _put(self, item: Response | Exception | None) -> None:
        turn = self._loop.create_future() if self._outbox else None
        self._outbox.append((item, turn))
        _resolve(self._arrival)
        if turn is not None:
            await turn

    def _start(self, answer: MessageReply[Body], work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._open[task] = answer
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        answer = self._open.pop(task)
        if task.cancelled() and not self._closed and not self._reader.done():
            # ``close`` has not cancelled it: the CancelledError is from inside the reply, and would hang a gRPC client.
            self._start(answer, self._fail(answer, RuntimeError("the generation was cancelled inside the server")))
        else:
            self._slots.release()

    async def _pump(self, answer: MessageReply[Body]) -> None:
        try:
            async for body in answer.bodies():
                await self._put(self._convert(body))
                self._replied = True
        except Exception as error:
            await self._fail(answer, error)
        finally:
            answer.close()

    async def _fail(self, answer: MessageReply[Body], error: Exception) -> None:
        """If the stream's only message fails before its first reply, the stream fails; otherwise the message alone."""
        if self._closed:
            return
        if self._received == 1 and not self._replied:
            await self._put(error)
            return
        for body in answer.failure(error):
            await self._put(self._convert(body))


def _resolve(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
