"""Replies to one request for tokens: reads its token stream and writes it in the request's spelling.

Knows nothing of other requests on the same stream, nor of how a token stream is started: a callable starts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from mlserver_torch_stream.engine.api import TokenStream
from mlserver_torch_stream.errors import GenerationFailed, as_request_error
from mlserver_torch_stream.generation import Opened
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext, Spelling
from mlserver_torch_stream.types import GenerationRequest, TokenEvent

Start = Callable[[Opened], Awaitable[None]]


class TokenReply:
    """Reads the token stream that ``start`` opens, once: as a stream of messages or as a whole.

    ``posted``: the body that the request was read from, for replies over REST.
    """

    def __init__(
        self,
        request: GenerationRequest,
        spelling: Spelling,
        context: ReplyContext,
        start: Start,
        posted: PostedBody | None = None,
    ) -> None:
        self._request = request
        self._spelling = spelling
        self._context = context
        self._start = start
        self._posted = posted
        self._starting: asyncio.Future[None] | None = None
        self._stream: TokenStream | None = None
        self._closed = False
        self._begun = False
        self._unfinished = len(request.prompts) * request.sampling.n  # sequences whose last event has not been read
        self._encoder = spelling.stream(request, context)
        self.error: Exception | None = None  # the error of the first sequence that failed after the reply had begun

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def comments(self) -> bool:
        return self._spelling.comments

    def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()  # a prompt that waits to be tokenized waits no longer
        if self._stream is not None:
            self._stream.close()

    async def bodies(self) -> AsyncIterator[JsonObject]:
        """The messages; one whole reply, if the request said ``stream: false``."""
        if self._request.stream is False:
            yield await self.whole()
            return
        encode = self._encoder.event
        async for event in await self._started():
            for part in (event,) if event.finish_reason is None else self._last_parts(event):
                messages = encode(part)
                self._begun = True
                for message in messages:
                    yield message
        self._check_end()

    async def whole(self) -> JsonObject:
        """All that was generated, as one reply."""
        encoder = self._spelling.whole(self._request, self._context)
        async for event in await self._started():
            if event.error is not None:
                raise as_request_error(event.error)
            self._unfinished -= event.finish_reason is not None
            encoder.add(event)
        self._check_end()
        return encoder.body()

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """The whole reply over REST, and the raw bytes that follow its JSON."""
        whole = await self.whole()
        return (whole, None) if self._posted is None else self._spelling.attach(self._posted, whole)

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        """The last messages, with the error, of the sequences that have not ended."""
        return self._encoder.fail(error)

    def end(self) -> bytes | None:
        return self._encoder.end()

    async def _started(self) -> TokenStream:
        self._starting = asyncio.ensure_future(self._start(self._opened))
        try:
            await self._starting
        finally:
            self._starting = None  # its error has frames that hold this reply: a cycle would keep the prompts
        assert self._stream is not None
        return self._stream

    def _last_parts(self, event: TokenEvent) -> Sequence[TokenEvent]:
        """The last event of a sequence, divided. Raises its error if the client has been sent nothing."""
        if event.error is not None and not self._begun and not event.size:
            raise as_request_error(event.error)
        self.error = self.error or event.error
        self._unfinished -= 1
        return event.split_failure()

    def _check_end(self) -> None:
        """Raises an error if the token stream has ended before its sequences."""
        if self._unfinished and self._closed:
            raise asyncio.CancelledError("the reply was closed before its end")
        if self._unfinished:
            raise GenerationFailed("the token stream ended early")

    def _opened(self, stream: TokenStream) -> None:
        self._stream = stream
        if self._closed:
            stream.close()
