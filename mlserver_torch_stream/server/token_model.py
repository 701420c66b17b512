"""A model that generates tokens: it decodes requests in their spelling, and turns token streams into replies.

The first message of a gRPC stream says how to read the further messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.engine.api import AdapterSet, Mailbox
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, as_request_error
from mlserver_torch_stream.generation import Generator, Opened
from mlserver_torch_stream.protocol.seldon_spelling import spelling_of
from mlserver_torch_stream.protocol.spelling import JsonObject, PostedBody, PromptSpelling, ReplyContext, Spelling
from mlserver_torch_stream.protocol.v2_reply import V2
from mlserver_torch_stream.protocol.v2_request import decode_piece
from mlserver_torch_stream.server.host import default_models, find_model
from mlserver_torch_stream.server.observability.request_observer import EndpointKind, ignored_parameters
from mlserver_torch_stream.server.options import ServerOptions, read_options
from mlserver_torch_stream.server.request import MessageRequest, RestRequest, ServedModel
from mlserver_torch_stream.types import GenerationRequest, StreamMode, TextPrompt, TokenEvent

Start = Callable[[Opened], Awaitable[None]]


class TokenReply:
    """The reply from the token stream that ``start`` opens. It can be read once, as a stream of messages or as a whole.

    ``posted`` is the body of a REST request. If ``reads_following`` is true, ``start`` reads all further messages of
    the gRPC stream.
    """

    def __init__(
        self,
        request: GenerationRequest,
        spelling: Spelling,
        context: ReplyContext,
        start: Start,
        posted: PostedBody | None = None,
        *,
        reads_following: bool = False,
    ) -> None:
        self.reads_following = reads_following
        self._request = request
        self._spelling = spelling
        self._context = context
        self._start = start
        self._posted = posted
        self._starting: asyncio.Future[None] | None = None
        self._stream: Mailbox | None = None
        self._closed = False
        self._begun = False
        self._unfinished = len(request.prompts) * request.sampling.n  # sequences whose last event was not read yet
        self._encoder = spelling.stream(request, context)
        self.error: Exception | None = None  # the first error of a sequence after the reply's start

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def keep_alive(self) -> bytes:
        return self._spelling.keep_alive

    def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()  # a prompt may still be waiting to be tokenized
        if self._stream is not None:
            self._stream.close()

    async def bodies(self) -> AsyncIterator[JsonObject]:
        """Yields the messages of the stream; for a request with ``stream: false``, the whole reply as one message."""
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
        """Collects the token stream into one reply. Raises RequestError if a sequence fails."""
        encoder = self._spelling.whole(self._request, self._context)
        async for event in await self._started():
            if event.error is not None:
                raise as_request_error(event.error)
            self._unfinished -= event.finish_reason is not None
            encoder.add(event)
        self._check_end()
        return encoder.body()

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        """Returns the whole REST reply, and the raw bytes after its JSON; None if there are no such bytes."""
        whole = await self.whole()
        return (whole, None) if self._posted is None else self._spelling.attach(self._posted, whole)

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        """Returns the messages that end each open sequence with ``error``."""
        return self._encoder.fail(error)

    def end(self) -> bytes | None:
        return self._encoder.end()

    async def _started(self) -> Mailbox:
        self._starting = asyncio.ensure_future(self._start(self._opened))
        try:
            await self._starting
        finally:
            self._starting = None  # its error's frames refer to this reply, and the cycle would keep the prompts
        assert self._stream is not None
        return self._stream

    def _last_parts(self, event: TokenEvent) -> Sequence[TokenEvent]:
        """Splits the last event of a failed sequence into its tokens and its failure. Raises the error instead if
        nothing has been sent.
        """
        if event.error is not None and not self._begun and not event.size:
            raise as_request_error(event.error)
        self.error = self.error or event.error
        self._unfinished -= 1
        return event.split_failure()

    def _check_end(self) -> None:
        """Raises an error if the token stream ended before all its sequences."""
        if self._unfinished and self._closed:
            raise asyncio.CancelledError("the reply was closed before its end")
        if self._unfinished:
            raise GenerationFailed("the token stream ended early")

    def _opened(self, stream: Mailbox) -> None:
        self._stream = stream
        if self._closed:
            stream.close()


class PromptReply:
    """The reply to a request that concerns only a prompt. It is the result of ``answer``, which is called once, in a
    thread.
    """

    keep_alive = b""
    reads_following = False
    error: Exception | None = None

    def __init__(self, request_id: str, answer: Callable[[], Awaitable[JsonObject]]) -> None:
        self.request_id = request_id
        self._answer = answer

    async def bodies(self) -> AsyncIterator[JsonObject]:
        yield await self._answer()

    async def whole(self) -> JsonObject:
        return await self._answer()

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        return await self._answer(), None

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        return ()

    def end(self) -> bytes | None:
        return None

    def close(self) -> None:
        """Does nothing, because the work of a thread cannot be stopped."""


_NOT_FIRST = "prompt is allowed only in the first message of a stream, on MLServer's own gRPC service"


class TokenModel(ServedModel):
    """A model that generates tokens."""

    def generator(self, endpoint: EndpointKind) -> Generator:
        """Returns the generator, which turns requests into token streams. Raises NotServing if no model is loaded."""
        built = self._slot.built
        return Generator(built.engine, built.codec, built.engine.info, self.observers(endpoint))

    @property
    def adapters(self) -> AdapterSet | None:
        """The model's LoRA adapters; None if its engine does not support adapters, or if the model currently has no
        engine.
        """
        try:
            found: AdapterSet | None = self._slot.built.adapters
        except NotServing:
            return None
        return found

    @property
    def adapter_names(self) -> frozenset[str]:
        """The names of the LoRA adapters; empty if the model does not support adapters."""
        return frozenset() if self.adapters is None else self.adapters.names

    def most_open(self) -> int:
        """Returns ``max_num_seqs``, which is also the number of requests of one gRPC stream that may run at once.
        Raises NotServing if the model is not loaded.
        """
        return int(self._slot.built.engine.info.max_num_seqs)

    def reply(self, request: RestRequest) -> TokenReply | PromptReply:
        generator, posted, spelling = self.generator(request.endpoint), request.posted, request.spelling
        streaming, request_id = request.endpoint.streams, request.request_id
        decoded = spelling.decode(posted, generator.info, streaming=streaming, request_id=request_id)
        if isinstance(spelling, PromptSpelling):
            return PromptReply(request_id, partial(generator.answer, decoded, spelling.answer))
        if request.adapter is not None:
            decoded = replace(decoded, adapter=request.adapter)
        context = request.context(decoded.request_id)
        return TokenReply(decoded, spelling, context, partial(generator.start, decoded), posted)

    def message_reply(self, message: MessageRequest) -> TokenReply:
        generator, payload, index = self.generator(message.endpoint), message.payload, message.index
        spelling = spelling_of(tensor.name for tensor in payload.inputs)
        streaming, request_id = index is not None, message.request_id
        with ignored_parameters(read_options(), self.name, request_id):
            request = spelling.decode_message(payload, generator.info, streaming=streaming, request_id=request_id)
        if index is not None and message.following is None and request.stream_mode is not StreamMode.EACH:
            raise InvalidInput("stream_mode", _NOT_FIRST)
        context = self._context(index)
        if message.following is None or request.stream_mode is not StreamMode.PROMPT:
            return TokenReply(request, spelling, context, partial(generator.start, request))
        pieces = (decode_piece(payload, request, generator.info) async for payload in message.following)
        start = partial(generator.assemble, request, pieces, timeout=read_options().piece_timeout)
        return TokenReply(request, spelling, context, start, reads_following=True)

    def message_failure(self, request_id: str, index: int, error: Exception) -> Sequence[JsonObject]:
        placeholder = GenerationRequest(request_id, (TextPrompt(""),))
        return V2.stream(placeholder, self._context(index)).fail(error)

    def _context(self, index: int | None) -> ReplyContext:
        return ReplyContext(self.name, self.version, int(time.time()), index)


def find_adapter(registry: MultiModelRegistry, name: str) -> TokenModel | None:
    """Returns the model that has an adapter of this name, or None."""
    for model in default_models(registry):
        if isinstance(model, TokenModel) and name in model.adapter_names:
            return model
    return None


def name_of_alias(registry: MultiModelRegistry, options: ServerOptions, name: str) -> str:
    """Returns the model's name: ``name`` itself if a model has it, else the name for which it is an alias."""
    return name if find_model(registry, name, None) is not None else options.model_of_alias(name)


def only_model(registry: MultiModelRegistry) -> str:
    """Returns the name of the only model that generates tokens. Raises InvalidInput unless there is exactly one."""
    names = [model.name for model in default_models(registry) if isinstance(model, TokenModel)]
    if len(names) != 1:
        raise InvalidInput(
            "model", f"is required unless the server has exactly one model that generates tokens; it has {len(names)}"
        )
    return names[0]
