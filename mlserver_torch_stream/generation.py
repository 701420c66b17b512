"""From a decoded request to its running token stream: prompts are tokenized and submitted.

Knows neither V2 nor MLServer, and nothing of an engine beyond its interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mlserver_torch_stream.engine.api import DEFAULT_PRIORITY, Engine, EngineRequest, TokenStream
from mlserver_torch_stream.prompt_pieces import Arrivals
from mlserver_torch_stream.types import (
    ChatPrompt,
    GenerationRequest,
    ModelInfo,
    Prompt,
    TextPrompt,
    TokenEvent,
    TokensPrompt,
)

# Fast tokenizers do about 1 MB/s at worst: 4,096 characters hold the event loop for less than 4 ms.
_MOST_CHARS_ON_LOOP = 4096
# The pieces of a text are tokenized anew when they have grown by this factor, so that n pieces cost O(n).
_GROWTH = 1.25

_T = TypeVar("_T")
Opened = Callable[[TokenStream], None]
"""Is given a stream as soon as there is one, so that its owner can close it at any time."""


class PromptEncoder(Protocol):
    """The tokenizer's side of an engine: prompts to ids."""

    def encode(self, prompt: Prompt) -> Sequence[int]: ...

    def stable_prefix(self, text: str) -> Sequence[int]:
        """Ids of the part of ``text`` that more text behind it cannot change."""


class RequestObserver(Protocol):
    """Is told how one request fares; what it is told after the request's end it ignores."""

    def prompted(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """Its prompts are known to their end."""

    def accepted(self) -> None:
        """The engine has it."""

    def event(self, event: TokenEvent) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def closed(self) -> None:
        """Nobody reads on."""


class RequestObservers(Protocol):
    """Is told of every request before anything is done for it."""

    def started(self, request: GenerationRequest) -> RequestObserver: ...

    def refused(self, request_id: str, error: BaseException) -> None:
        """A request that could not be decoded."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A loaded model's engine and codec: what turns requests into token streams, each watched by ``watcher``."""

    engine: Engine
    codec: PromptEncoder
    info: ModelInfo
    watcher: RequestObservers | None = None

    async def start(self, request: GenerationRequest, opened: Opened) -> None:
        """Submits all prompts of a request. Raises RequestError."""
        n = request.sampling.n
        submitted = []
        with self._watched(request) as watch:
            for position, prompt in enumerate(request.prompts):
                ids = tuple(await _off_loop_if_long(self.codec.encode, prompt))
                submitted.append(_engine_request(request, ids, first_index=position * n))
            watch.prompted(request.prompts, sum(len(each.prompt_ids) for each in submitted))
            opened(_ObservedStream(self.engine.submit(submitted), watch))

    async def assemble(
        self, request: GenerationRequest, pieces: AsyncIterator[Prompt], opened: Opened, *, timeout: float = 0.0
    ) -> None:
        """Submits one prompt that comes in pieces: prefilled as they come, sealed when they end.

        ``pieces`` are of the same kind as the request's own prompt, the first piece; the next one has to come within
        ``timeout`` seconds (0: at any time). Raises RequestError.
        """
        with self._watched(request) as watch:
            stream = _ObservedStream(self.engine.submit([_engine_request(request, open=True)]), watch)
            opened(stream)
            arrivals = Arrivals(pieces, stream, timeout)
            try:
                prompt = await self._whole(request.prompts[0], arrivals, stream)
            finally:
                arrivals.close()
            ids = await _off_loop_if_long(self.codec.encode, prompt)
            watch.prompted([prompt], len(ids))
            stream.seal(ids)

    async def _whole(self, first: Prompt, arrivals: Arrivals[Prompt], stream: TokenStream) -> Prompt:
        """The prompt of all pieces, each of which ``stream`` has been told of."""
        parts: list[Prompt] = []
        known = _KnownIds(self.codec)
        piece: Prompt | None = first
        while piece is not None:
            parts.append(piece)
            stream.extend(await known.grow(piece))
            piece = await arrivals.next()
        return _join(parts)

    @contextmanager
    def decoding(self, request_id: str) -> Iterator[None]:
        """Inside it a request is made; one that cannot be is never started, so it has to be noticed here."""
        try:
            yield
        except Exception as error:
            if self.watcher is not None:
                self.watcher.refused(request_id, error)
            raise

    @contextmanager
    def _watched(self, request: GenerationRequest) -> Iterator[RequestObserver]:
        """Whatever ends the start of a request ends its watch."""
        watch = _NO_OBSERVER if self.watcher is None else self.watcher.started(request)
        try:
            yield watch
        except (asyncio.CancelledError, GeneratorExit):
            watch.closed()
            raise
        except BaseException as error:
            watch.failed(error)
            raise


def _engine_request(
    request: GenerationRequest, prompt_ids: tuple[int, ...] = (), *, first_index: int = 0, open: bool = False
) -> EngineRequest:
    return EngineRequest(
        prompt_ids,
        request.sampling,
        first_index,
        open,
        priority=request.priority or DEFAULT_PRIORITY,
        client=request.client,
        timeout_s=request.timeout_s,
    )


class _ObservedStream:
    """A token stream whose watch sees each event when its reader takes it."""

    def __init__(self, stream: TokenStream, watch: RequestObserver) -> None:
        self._stream = stream
        self._watch = watch
        self.extend = stream.extend
        self.seal = stream.seal
        watch.accepted()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        event = await self._stream.__anext__()
        self._watch.event(event)
        return event

    def close(self) -> None:
        self._stream.close()
        self._watch.closed()


class _NoObserver:
    """Watches nothing."""

    def prompted(self, prompts: Sequence[Prompt], tokens: int) -> None: ...

    def accepted(self) -> None: ...

    def event(self, event: TokenEvent) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def closed(self) -> None: ...


_NO_OBSERVER = _NoObserver()


class _KnownIds:
    """The ids of a growing prompt that no further piece will change; those of a chat are known at its end."""

    def __init__(self, codec: PromptEncoder) -> None:
        self._codec = codec
        self._texts: list[str] = []
        self._length = 0
        self._tokenized_length = 0
        self._count = 0

    async def grow(self, piece: Prompt) -> Sequence[int]:
        """The newly known ids."""
        if isinstance(piece, TokensPrompt):
            return piece.token_ids
        if isinstance(piece, ChatPrompt):
            return ()
        self._texts.append(piece.text)
        self._length += len(piece.text)
        if self._length < self._tokenized_length * _GROWTH:
            return ()
        self._tokenized_length = self._length
        ids = await _off_loop_if_long(self._codec.stable_prefix, "".join(self._texts))
        fresh = ids[self._count :]
        self._count = max(self._count, len(ids))
        return fresh


def _join(parts: Sequence[Prompt]) -> Prompt:
    """The whole prompt; a chat is never cut, so it is its only part."""
    if isinstance(parts[0], TextPrompt):
        return TextPrompt("".join(part.text for part in parts if isinstance(part, TextPrompt)))
    if isinstance(parts[0], TokensPrompt):
        return TokensPrompt(tuple(i for part in parts if isinstance(part, TokensPrompt) for i in part.token_ids))
    return parts[0]


async def _off_loop_if_long(work: Callable[[_T], Sequence[int]], value: _T) -> Sequence[int]:
    if _size(value) <= _MOST_CHARS_ON_LOOP:
        return work(value)
    return await asyncio.to_thread(work, value)


def _size(value: object) -> int:
    if isinstance(value, TextPrompt):
        return len(value.text)
    if isinstance(value, ChatPrompt):
        return sum(len(str(message)) for message in value.messages)
    return len(value) if isinstance(value, str) else 0
