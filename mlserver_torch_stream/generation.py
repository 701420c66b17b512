"""From a decoded request to its running token stream: prompts are tokenized and submitted.

Knows neither V2 nor MLServer, and nothing of an engine beyond its interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from mlserver_torch_stream.engine.api import DEFAULT_PRIORITY, Engine, PromptJob, TokenStream
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest, ModelInfo, Prompt, TextPrompt, TokensPrompt

# Fast tokenizers do about 1 MB/s at worst: 4,096 characters hold the event loop for less than 4 ms.
_MOST_CHARS_ON_LOOP = 4096
# The pieces of a text are tokenized anew when they have grown by this factor, so that n pieces cost O(n).
_GROWTH = 1.25

_T = TypeVar("_T")
Opened = Callable[[TokenStream], None]
"""Is given a stream as soon as there is one, so that its owner can close it at any time."""


class Codec(Protocol):
    """The tokenizer's side of an engine: prompts to ids."""

    def encode(self, prompt: Prompt) -> Sequence[int]: ...

    def stable_prefix(self, text: str) -> Sequence[int]:
        """Ids of the part of ``text`` that more text behind it cannot change."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A loaded model's engine and codec: what turns requests into token streams."""

    engine: Engine
    codec: Codec
    info: ModelInfo

    async def start(self, request: GenerationRequest, opened: Opened) -> None:
        """Submits all prompts of a request. Raises RequestError."""
        n = request.sampling.n
        jobs = []
        for position, prompt in enumerate(request.prompts):
            ids = tuple(await _off_loop_if_long(self.codec.encode, prompt))
            jobs.append(replace(self._job(request), prompt_ids=ids, first_index=position * n))
        opened(self.engine.submit(jobs))

    async def assemble(self, request: GenerationRequest, pieces: AsyncIterator[Prompt], opened: Opened) -> None:
        """Submits one prompt that comes in pieces: prefilled as they come, sealed when they end.

        ``pieces`` are of the same kind as the request's own prompt, the first piece. Raises RequestError.
        """
        stream = self.engine.submit([replace(self._job(request), open=True)])
        opened(stream)
        parts = [request.prompts[0]]
        known = _KnownIds(self.codec)
        stream.extend(await known.grow(parts[0]))
        async for piece in pieces:
            parts.append(piece)
            stream.extend(await known.grow(piece))
        stream.seal(await _off_loop_if_long(self.codec.encode, _join(parts)))

    @staticmethod
    def _job(request: GenerationRequest) -> PromptJob:
        return PromptJob(
            prompt_ids=(),
            sampling=request.sampling,
            priority=request.priority or DEFAULT_PRIORITY,
            client=request.client,
            timeout_s=request.timeout_s,
        )


class _KnownIds:
    """The ids of a growing prompt that no further piece will change; those of a chat are known at its end."""

    def __init__(self, codec: Codec) -> None:
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
