"""One gRPC call on which every message is a separate request, and all are answered at the same time.

Knows nothing of how a message is answered, nor of how the call ends for its client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Generic

from mlserver.logging import logger

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.server.lifecycle.inflight_requests import until
from mlserver_torch_stream.server.process_state import LIFECYCLE
from mlserver_torch_stream.server.streams.concurrent_replies import Body, ConcurrentReplies, MessageReply
from mlserver_torch_stream.server.streams.read_timeout import ReadTimeout

# Requests of one call that run or wait in their model's queue at the same time; further ones are not read yet.
_MOST_OPEN = 256


class MessageStream(Generic[Body]):
    """Yields the bodies of all answers. Ends when the client has closed its side and every request is answered.

    At a shutdown no further message is read, and NotServing is raised in the end: after a normal end a client would go
    on sending requests into a stream that has no reader. ``stalled_after``: seconds in which the client must take a
    body (0: no bound). ``client``: the name of a client in the log.
    """

    def __init__(
        self,
        messages: AsyncIterator[bytes],
        answer: Callable[[bytes, int], MessageReply[Body]],
        stalled_after: float,
        client: str,
    ) -> None:
        self._messages = messages
        self._ended = False  # the client has closed its side
        self._stalled_after = stalled_after
        self._client = client
        self._replies = ConcurrentReplies(until(LIFECYCLE.refusing, self._all()), answer, _unchanged, _MOST_OPEN)
        self._unread = ReadTimeout(self._replies, stalled_after, self._stalled)

    def __aiter__(self) -> AsyncIterator[Body]:
        return self

    async def __anext__(self) -> Body:
        """Raises NotServing and TimedOut."""
        try:
            return await anext(self._unread)
        except StopAsyncIteration:
            if not self._ended:
                raise NotServing(LIFECYCLE.shutdown_reason or "the server is shutting down") from None
            raise

    def close(self) -> None:
        """Cancels the requests that still run. Synchronous: it may run in a task that cannot wait."""
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
