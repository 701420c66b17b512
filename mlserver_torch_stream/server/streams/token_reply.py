"""Opens and writes the replies to requests for tokens: reads a token stream in the request's spelling.

The first message of a stream says what several messages mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from mlserver.types import InferenceRequest

from mlserver_torch_stream.engine.api import TokenStream
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, as_request_error
from mlserver_torch_stream.generation import Generator, Opened
from mlserver_torch_stream.protocol.seldon_spelling import spelling_of
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, ReplyContext, Spelling
from mlserver_torch_stream.protocol.v2_reply import V2
from mlserver_torch_stream.protocol.v2_request import decode_piece
from mlserver_torch_stream.server.observability.request_log import ignored_parameters
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.types import GenerationRequest, StreamMode, TextPrompt, TokenEvent

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
    def keep_alive(self) -> bytes:
        return self._spelling.keep_alive

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


_NOT_FIRST = "only the first message of a stream in MLServer's own framing may say prompt"


class TokenOpener:
    """At most as many requests are open at once as a batch has rows."""

    def __init__(self, generator: Generator, name: str, version: str | None) -> None:
        self.most_open = generator.info.max_num_seqs
        self._generator = generator
        self._name = name
        self._version = version

    def open(
        self,
        payload: InferenceRequest,
        request_id: str,
        index: int | None = None,
        following: AsyncIterator[InferenceRequest] | None = None,
    ) -> tuple[TokenReply, bool]:
        info = self._generator.info
        ignored = ignored_parameters(read_options(), self._name, request_id)
        with self._generator.decoding(request_id), ignored:
            spelling = spelling_of(tensor.name for tensor in payload.inputs)
            request = spelling.decode_message(payload, info, streaming=index is not None, request_id=request_id)
            if index is not None and following is None and request.stream_mode is not StreamMode.EACH:
                raise InvalidInput("stream_mode", _NOT_FIRST)
        context = self._context(index)
        if following is None or request.stream_mode is not StreamMode.PROMPT:
            return TokenReply(request, spelling, context, partial(self._generator.start, request)), False
        return TokenReply(request, spelling, context, partial(self._assemble, request, following)), True

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        placeholder = GenerationRequest(request_id, (TextPrompt(""),))
        return V2.stream(placeholder, self._context(index)).fail

    def _context(self, index: int | None) -> ReplyContext:
        return ReplyContext(self._name, self._version, int(time.time()), index)

    async def _assemble(
        self, request: GenerationRequest, following: AsyncIterator[InferenceRequest], opened: Opened
    ) -> None:
        pieces = (decode_piece(payload, request, self._generator.info) async for payload in following)
        await self._generator.assemble(request, pieces, opened, timeout=read_options().piece_timeout)
