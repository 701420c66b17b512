"""Serves one gRPC stream: reads its messages, answers them concurrently, and ends when its reader stalls.

The time limit assumes that the reader asks for an item as soon as the previous one has been sent, as gRPC does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Generic, Protocol, TypeVar
from uuid import uuid4

from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse

from mlserver_torch_stream.errors import InvalidInput, NotServing, RequestError, TimedOut
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.v2_reply import as_response
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle, until
from mlserver_torch_stream.server.options import LAST_LOOK_S
from mlserver_torch_stream.server.request import MessageRequest, Reply, Request, ServedModel

Message = TypeVar("Message")
Body = TypeVar("Body")
Body_co = TypeVar("Body_co", covariant=True)
Response = TypeVar("Response")


class MessageReply(Protocol[Body_co]):
    """The reply to one message."""

    def bodies(self) -> AsyncIterator[Body_co]:
        """Yields the bodies of the reply."""

    def failure(self, error: Exception) -> Sequence[Body_co]:
        """Returns the bodies that end a failed reply. The other replies of the stream continue."""

    def close(self) -> None:
        """Cancels the work for this reply. Does not await; a second call does nothing."""


class ConcurrentReplies(Generic[Message, Body, Response]):
    """Reads messages, answers at most ``most_open`` of them at a time, and yields the converted bodies of all replies.

    One task reads the messages, and each message is answered by a separate task; the object keeps references to all
    tasks until they have ended. After adding an item to the outbox, a task waits until the item is the first one there,
    so a task has at most two items in the outbox. If the reader is slow, the tasks therefore wait, and token streams
    merge their events. ``close`` is synchronous, because clean-up may run in a task that can no longer await.
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
        # Items, each with the future that its task awaits, or None if the outbox was empty.
        self._outbox: deque[tuple[Response | Exception | None, asyncio.Future[None] | None]] = deque()
        self._arrival: asyncio.Future[None] | None = None  # the reader awaits it if the outbox is empty
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
        """Cancels all replies, and ends the iteration. Does not await; a second call does nothing."""
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
            if not self._closed:  # after that, no reader would take the item, and the task would never end
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
            # The CancelledError is not from ``close`` but from inside the reply, and would hang a gRPC client.
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
        """If the failed message is the only one in the stream and nothing has been sent, ends the whole stream with the
        error. Otherwise only the reply to this message fails.
        """
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


T = TypeVar("T")


class ReadTimeout(Generic[T]):
    """Yields the items. If the reader requests no item for ``seconds`` seconds, calls ``stalled`` and raises TimedOut.

    With 0 seconds there is no limit.
    """

    def __init__(self, items: AsyncIterator[T], seconds: float, stalled: Callable[[], None]) -> None:
        self._items = items
        self._seconds = seconds
        self._stalled = stalled
        self._limited = seconds > 0
        self._given_up = False
        self._loop = asyncio.get_running_loop()
        self._given_at: float | None = None  # when the reader got its current item; None if it has no item
        self._overdue: float | None = None  # the _given_at of an item that was already overdue at the last check
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        self._given_at = None
        if self._given_up:
            raise TimedOut(f"nothing was read for {self._seconds:g} s")
        item = await anext(self._items)
        self._given_at = self._loop.time()
        if self._limited and self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)
        return item

    def close(self) -> None:
        """Switches the limit off. Idempotent."""
        self._limited = False
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Ends the stream if the reader was overdue with the same item at two checks. Many items share one timer."""
        self._timer = None
        if self._given_at is None:
            return
        left = self._given_at + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif self._overdue != self._given_at:
            self._overdue = self._given_at
            self._timer = self._loop.call_later(LAST_LOOK_S, self._check)
        else:
            self._given_up = True
            self._stalled()


class StreamSession:
    """Answers one ``ModelStreamInfer`` call. The reply to the first message says whether that reply also reads the
    other messages.

    MLServer gives all messages of a stream the id of the first, so each further request gets a new id here. The next
    message is read when the number of running requests is below the model's ``most_open``. If the reader takes no
    response for ``stalled_after`` seconds, the stream is cut; 0 means no limit. ``request`` is the request of the first
    message.
    """

    def __init__(
        self,
        request: Request[Reply],
        model: ServedModel,
        payloads: AsyncIterator[InferenceRequest],
        stalled_after: float,
    ) -> None:
        self._request = request
        self._model = model
        self._payloads = payloads
        self._stalled_after = stalled_after
        self._replies: ConcurrentReplies[InferenceRequest | None, JsonObject, InferenceResponse] | None = None
        self._unread: ReadTimeout[InferenceResponse] | None = None

    async def open(self) -> AsyncIterator[InferenceResponse]:
        """Yields the responses. Raises RequestError if the first message is wrong."""
        most_open = self._model.most_open()
        first = await anext(self._payloads, None)
        if first is None:
            raise InvalidInput("inputs", "the stream ended before its first message")
        request_id = self._request.request_id = first.id or str(uuid4())
        following = until(self._model.inflight.aborting, self._payloads)
        message = MessageRequest(first, request_id, self._request.kind, 0, following)
        reply = self._request.reply = self._model.message_reply(message)

        def answer(message: InferenceRequest | None, index: int) -> MessageReply[JsonObject]:
            return reply if message is None else self._further(message, index)

        messages = self._messages(only_first=reply.reads_following)
        self._replies = ConcurrentReplies(messages, answer, as_response, most_open)
        self._unread = ReadTimeout(self._replies, self._stalled_after, self._stalled)
        return self._unread

    def close(self) -> None:
        """Cancels the replies that still run. Does not await; a second call does nothing."""
        if self._unread is not None:
            self._unread.close()
        if self._replies is not None:
            self._replies.close()

    async def _messages(self, *, only_first: bool) -> AsyncIterator[InferenceRequest | None]:
        """Yields the messages; None stands for the first message, which has been read already."""
        yield None
        if not only_first:
            async for payload in until(self._model.inflight.refusing, self._payloads):
                yield payload

    def _further(self, payload: InferenceRequest, index: int) -> MessageReply[JsonObject]:
        request = self._request.following(f"{self._request.request_id}-{index}")
        try:
            return self._model.message_reply(MessageRequest(payload, request.request_id, request.kind, index))
        except RequestError as error:
            request.record(error)
            return _RefusedReply(self._model.message_failure(request.request_id, index, error))

    def _stalled(self) -> None:
        seconds, name = self._stalled_after, self._model.name
        logger.warning(f"A client of model '{name}' has read nothing for {seconds:g} s: its stream is closed")
        self.close()


class _RefusedReply:
    """The reply to a message that could not be read."""

    def __init__(self, bodies: Sequence[JsonObject]) -> None:
        self._bodies = bodies

    async def bodies(self) -> AsyncIterator[JsonObject]:
        for body in self._bodies:
            yield body

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        return ()

    def close(self) -> None: ...


# The number of requests of one call that may run or wait in a queue; further messages are not read yet.
_MAX_OPEN = 256


class MessageStream(Generic[Body]):
    """Yields the bodies of all answers. Ends when the client has closed its side and every request is answered.

    At a shutdown no further message is read, and the stream ends with NotServing. If it ended normally, a client would
    go on sending requests that nobody reads. The client must take each body within ``stalled_after`` seconds; 0 means
    no limit. ``client`` names the client in the log.
    """

    def __init__(
        self,
        messages: AsyncIterator[bytes],
        answer: Callable[[bytes, int], MessageReply[Body]],
        stalled_after: float,
        client: str,
        lifecycle: Lifecycle,
    ) -> None:
        self._lifecycle = lifecycle
        self._messages = messages
        self._ended = False  # True: the client has closed its side
        self._stalled_after = stalled_after
        self._client = client
        self._replies = ConcurrentReplies(until(lifecycle.refusing, self._all()), answer, _unchanged, _MAX_OPEN)
        self._unread = ReadTimeout(self._replies, stalled_after, self._stalled)

    def __aiter__(self) -> AsyncIterator[Body]:
        return self

    async def __anext__(self) -> Body:
        """Returns the next body. Raises NotServing at a shutdown, and TimedOut if the client reads nothing."""
        try:
            return await anext(self._unread)
        except StopAsyncIteration:
            if not self._ended:
                raise NotServing(self._lifecycle.shutdown_reason or "the server is shutting down") from None
            raise

    def close(self) -> None:
        """Cancels the requests that still run. Synchronous, because it may run in a task that can no longer await."""
        self._unread.close()
        self._replies.close()

    def _stalled(self) -> None:
        logger.warning(f"{self._client} has read nothing for {self._stalled_after:g} s: its stream is closed")
        self._replies.close()

    async def _all(self) -> AsyncIterator[bytes]:
        async for message in self._messages:
            yield message
        self._ended = True


def _unchanged(body: Body) -> Body:
    return body
