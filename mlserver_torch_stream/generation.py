"""Tokenizes the prompts of a decoded request and submits them to an engine, which streams the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from mlserver_torch_stream.engine.api import (
    DEFAULT_PRIORITY,
    Compilation,
    CompiledConstraint,
    Engine,
    EngineRequest,
    Mailbox,
)
from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull, TimedOut
from mlserver_torch_stream.types import (
    ChatPrompt,
    Constraint,
    GenerationRequest,
    ModelInfo,
    Prompt,
    ReasoningMarks,
    TextPrompt,
    TokenEvent,
    TokensPrompt,
)

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Receives the pieces of a prompt, and watches the prompt's stream meanwhile.

    Call ``next`` until it returns None, then read the stream; call ``close`` in any case. If ``seconds`` is 0, ``next``
    waits for a piece without a limit.
    """

    def __init__(self, pieces: AsyncIterator[T], stream: AsyncIterator[TokenEvent], seconds: float) -> None:
        self._pieces = pieces
        self._seconds = seconds
        # Nothing is generated before the prompt is complete, so the first event can only be the stream's end.
        self._end = asyncio.ensure_future(anext(stream))
        self._following: asyncio.Future[T] | None = None

    async def next(self) -> T | None:
        """Returns the next piece; None after the last.

        Raises TimedOut if no piece arrives in time. If the stream ends first, at a deadline, a shutdown or a failure,
        raises the error that ended it.
        """
        self._following = asyncio.ensure_future(anext(self._pieces))
        await asyncio.wait(
            (self._end, self._following), timeout=self._seconds or None, return_when=asyncio.FIRST_COMPLETED
        )
        if self._end.done():
            raise self._reason()
        if not self._following.done():
            raise TimedOut(f"no further piece of the prompt arrived within {self._seconds:g} s")
        try:
            return self._following.result()
        except StopAsyncIteration:
            pass
        self._end.cancel()  # the stream has one reader at a time
        await asyncio.wait((self._end,))
        if not self._end.cancelled():
            raise self._reason()
        return None

    def _reason(self) -> BaseException:
        error = self._end.exception()
        if error is not None and not isinstance(error, StopAsyncIteration):
            return error
        last = None if error is not None else self._end.result().error
        return last or NotServing("the stream ended before the prompt was complete")

    def close(self) -> None:
        """Ends the generation. It does not await, because it may run in a task that can no longer do so; a second call
        does nothing.
        """
        for waiting in (self._end, self._following):
            if waiting is not None and not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # retrieved, so that asyncio does not log it


# Fast tokenizers do about 1 MB/s at worst: 4,096 characters hold the event loop for less than 4 ms.
_MAX_CHARS_ON_LOOP = 4096
_MAX_CHARS_TOGETHER = 2**16  # the total length of the prompts of one request that are tokenized together
# The pieces of a text are checked again when they have grown by this factor, so that n pieces cost O(n).
_GROWTH = 1.25

_MAX_PROMPT_LOGPROBS = 2**20  # the maximum for one request, whose reply has up to 100 bytes for each log-probability
_LONGEST_COMPILATION_S = 10.0  # and the longest wait until a compilation begins

_T = TypeVar("_T")
_R = TypeVar("_R")
Opened = Callable[[Mailbox], None]
"""Is called with a stream as soon as there is one, so that its owner can close it at any time."""


class PromptEncoder(Protocol):
    """The tokenizer's side of an engine: prompts to ids."""

    @property
    def executor(self) -> Executor:
        """Runs ``encode`` in threads, a few at a time, for long prompts and for prompts that it ``blocks`` on."""

    def encode(self, prompt: Prompt) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_strings(self, ids: Sequence[int]) -> Sequence[str]: ...

    def blocks(self, prompt: Prompt) -> bool:
        """Whether ``encode`` waits for something, so that it must not run on the event loop."""

    def answer_format(self, prompt: ChatPrompt, ids: Sequence[int], constraint: Constraint | None) -> AnswerFormat:
        """Returns how the answer is divided into reasoning, text and calls, and the constraints on its text and calls.
        ``ids`` are the conversation's tokens.
        """

    def submit(
        self, constraint: Constraint, reasoning: ReasoningMarks | None = None
    ) -> Compilation[CompiledConstraint]:
        """Begins to compile a constraint. ``reasoning`` holds the marks of the reasoning that precedes the constrained
        text. The compilation may raise InvalidInput.
        """

    def check_length(self, text: str, field: str) -> None:
        """Raises ContextLengthExceeded if no prompt that begins with ``text`` can fit."""


class RequestObserver:
    """Sees what happens to one request until it ends, and ignores later calls. This one records nothing."""

    def prompted(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """The prompts are complete."""

    def accepted(self) -> None:
        """The engine has accepted the request."""

    def event(self, event: TokenEvent) -> None:
        """Called for every event that the reader takes, so it must be cheap."""

    def failed(self, error: BaseException) -> None:
        """The request ends with this error, which its client gets."""

    def closed(self) -> None:
        """Called when the stream is closed: its client reads no more events."""


class RequestObservers:
    """Makes an observer for each request, before the request is processed."""

    def started(self, request: GenerationRequest) -> RequestObserver:
        return RequestObserver()


@dataclass(frozen=True, slots=True)
class Generator:
    """A loaded model's engine and codec. Turns requests into token streams, which ``observers`` observe."""

    engine: Engine
    codec: PromptEncoder
    info: ModelInfo
    observers: RequestObservers = field(default_factory=RequestObservers)

    async def start(self, request: GenerationRequest, opened: Opened) -> None:
        """Submits all prompts of a request. Raises RequestError if the request cannot be accepted."""
        n = request.sampling.n
        submitted = []
        with self._observed(request) as observer:
            encoded = await self._encoded(request.prompts)
            _check_scores(request, sum(map(len, encoded)))
            for position, ids in enumerate(encoded):
                prompt = request.prompts[position]
                submitted.append(await self._prepared(request, prompt, ids, first_index=position * n))
            observer.prompted(request.prompts, sum(len(each.prompt_ids) for each in submitted))
            opened(_observed(self.engine.submit(submitted), observer))

    async def answer(
        self, request: GenerationRequest, answer: Callable[[GenerationRequest, PromptEncoder, ModelInfo], _R]
    ) -> _R:
        """Calls ``answer``, which needs only the prompts and not the engine, in a thread of the codec, and returns its
        result. Raises RequestError.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.codec.executor, answer, request, self.codec, self.info)
        except Exception as error:
            self.observers.started(request).failed(error)
            raise

    async def _prepared(
        self, request: GenerationRequest, prompt: Prompt, ids: tuple[int, ...], *, first_index: int
    ) -> EngineRequest:
        """Returns the engine's request for one prompt. Raises InvalidInput if the constraint of its answers cannot be
        compiled.
        """
        if not isinstance(prompt, ChatPrompt):
            constraint = await self._compiled(request.constraint)
            text = await self._echoed(prompt, ids) if request.reply.echo_prompt else ""
            return _engine_request(request, ids, constraint, first_index=first_index, prompt_text=text)
        answer = self.codec.answer_format(prompt, ids, request.constraint)
        constraint = await self._compiled(answer.constraint, answer.reasoning_marks)
        return _engine_request(request, ids, constraint, answer if answer.divides else None, first_index=first_index)

    async def _echoed(self, prompt: TextPrompt | TokensPrompt, ids: Sequence[int]) -> str:
        """Returns the text of a prompt that the reply repeats."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        decode = partial(self.codec.decode, ids, skip_special_tokens=False)
        return await asyncio.get_running_loop().run_in_executor(self.codec.executor, decode)

    async def _compiled(
        self, constraint: Constraint | None, reasoning: ReasoningMarks | None = None
    ) -> CompiledConstraint | None:
        """Returns the compiled constraint. Raises InvalidInput, which names the constraint's field, if compiling fails
        or takes too long, and QueueFull if other constraints keep it waiting.
        """
        if constraint is None:
            return None
        compiling = self.codec.submit(constraint, reasoning)
        compiled = asyncio.wrap_future(compiling)
        try:
            await asyncio.wait({asyncio.wrap_future(compiling.begun)}, timeout=_LONGEST_COMPILATION_S)
            if compiling.cancel():  # it has not begun
                raise QueueFull(f"{constraint.field}: other constraints are being compiled")
            return await asyncio.wait_for(compiled, _LONGEST_COMPILATION_S)
        except asyncio.TimeoutError:
            limit = f"compiling it takes more than {_LONGEST_COMPILATION_S:g} seconds"
            raise InvalidInput(constraint.field, f"is too complex: {limit}") from None
        finally:
            compiled.cancel()

    async def _encoded(self, prompts: Sequence[Prompt]) -> Sequence[tuple[int, ...]]:
        """Encodes the prompts group by group, so that no further group is begun once the client has disconnected."""
        encoded: list[tuple[int, ...]] = []
        for some in _in_pieces(prompts):
            encoded += await _off_loop_if_long(self.codec, self._encode_all, some)
        return encoded

    def _encode_all(self, prompts: Sequence[Prompt]) -> Sequence[tuple[int, ...]]:
        return [tuple(self.codec.encode(prompt)) for prompt in prompts]

    async def assemble(
        self, request: GenerationRequest, pieces: AsyncIterator[Prompt], opened: Opened, *, timeout: float = 0.0
    ) -> None:
        """Submits one prompt that arrives in pieces; the prompt is queued when it is complete.

        ``pieces`` are of the same kind as the request's own prompt, the first piece; the next one must arrive within
        ``timeout`` seconds, unless that is 0. Raises RequestError.
        """
        with self._observed(request) as observer:
            constraint = await self._compiled(request.constraint)
            open_request = _engine_request(request, (), constraint, open=True)
            stream = _observed(self.engine.submit([open_request]), observer)
            opened(stream)
            arrivals = Arrivals(pieces, stream, timeout)
            try:
                prompt = await self._whole(request.prompts[0], arrivals, stream)
            finally:
                arrivals.close()
            ids = (await self._encoded([prompt]))[0]
            observer.prompted([prompt], len(ids))
            stream.seal(ids)

    async def _whole(self, first: Prompt, arrivals: Arrivals[Prompt], stream: Mailbox) -> Prompt:
        """Returns the prompt of all pieces. A piece that makes the prompt too long is refused."""
        parts: list[Prompt] = []
        lengths = _TextLength(self.codec)
        piece: Prompt | None = first
        while piece is not None:
            parts.append(piece)
            if isinstance(piece, TokensPrompt):
                stream.extend(piece.token_ids)
            elif isinstance(piece, TextPrompt):
                await lengths.add(piece.text)
            piece = await arrivals.next()
        return _join(parts)

    @contextmanager
    def _observed(self, request: GenerationRequest) -> Iterator[RequestObserver]:
        """Calls the observer if the block raises, because an error ends the request."""
        observer = self.observers.started(request)
        try:
            yield observer
        except (asyncio.CancelledError, GeneratorExit):
            observer.closed()
            raise
        except BaseException as error:
            observer.failed(error)
            raise


def _check_scores(request: GenerationRequest, tokens: int) -> None:
    """Raises InvalidInput if the reply would have too many log-probabilities of prompt tokens."""
    top, n = request.sampling.prompt_logprobs, request.sampling.n
    if top is not None and (logprobs := tokens * (1 + top) * n) > _MAX_PROMPT_LOGPROBS:
        asked = f"{tokens} prompt tokens with {top} alternatives, {n} times: {logprobs} log-probabilities"
        raise InvalidInput("prompt_logprobs", f"asks for too much: {asked}; at most {_MAX_PROMPT_LOGPROBS} are allowed")


def _engine_request(
    request: GenerationRequest,
    prompt_ids: tuple[int, ...],
    constraint: CompiledConstraint | None,
    answer: AnswerFormat | None = None,
    *,
    first_index: int = 0,
    open: bool = False,
    prompt_text: str = "",
) -> EngineRequest:
    return EngineRequest(
        prompt_ids,
        request.sampling,
        first_index,
        open,
        priority=request.priority or DEFAULT_PRIORITY,
        client=request.client,
        timeout_s=request.timeout_s,
        constraint=constraint,
        answer=answer,
        adapter=request.adapter,
        prompt_text=prompt_text,
    )


def _observed(stream: Mailbox, observer: RequestObserver) -> Mailbox:
    """Returns the stream of an accepted request. The observer sees each event when the reader takes it."""
    stream.observe(observer)
    observer.accepted()
    return stream


class _TextLength:
    """Refuses a text that arrives in pieces as soon as it is certainly too long."""

    def __init__(self, codec: PromptEncoder) -> None:
        self._codec = codec
        self._texts: list[str] = []
        self._length = self._checked = 0

    async def add(self, text: str) -> None:
        """Adds a piece. Raises ContextLengthExceeded if no prompt that begins with the pieces so far can fit."""
        self._texts.append(text)
        self._length += len(text)
        if self._length >= self._checked * _GROWTH:
            self._checked = self._length
            check = partial(self._codec.check_length, field="text_input")
            await _off_loop_if_long(self._codec, check, "".join(self._texts))


def _join(parts: Sequence[Prompt]) -> Prompt:
    """Returns the whole prompt. A chat never arrives in pieces, so it has only one part."""
    if isinstance(parts[0], TextPrompt):
        return replace(parts[0], text="".join(part.text for part in parts if isinstance(part, TextPrompt)))
    if isinstance(parts[0], TokensPrompt):
        return TokensPrompt(tuple(i for part in parts if isinstance(part, TokensPrompt) for i in part.token_ids))
    return parts[0]


def _in_pieces(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    """Yields the prompts in groups: one prompt, or several that have at most ``_MAX_CHARS_TOGETHER`` characters
    together.
    """
    piece: list[Prompt] = []
    size = 0
    for prompt in prompts:
        size += _size(prompt)
        if piece and size > _MAX_CHARS_TOGETHER:
            yield piece
            piece, size = [], _size(prompt)
        piece.append(prompt)
    yield piece


async def _off_loop_if_long(codec: PromptEncoder, work: Callable[[_T], _R], value: _T) -> _R:
    """Runs ``work`` in one of the codec's threads, which bound how much text is tokenized concurrently. Short work runs
    at once on the event loop.
    """
    prompts = value if isinstance(value, list) else [TextPrompt(value)] if isinstance(value, str) else []
    if not any(map(codec.blocks, prompts)) and sum(map(_size, prompts)) <= _MAX_CHARS_ON_LOOP:
        return work(value)
    return await asyncio.get_running_loop().run_in_executor(codec.executor, work, value)


def _size(prompt: Prompt) -> int:
    """Returns the number of characters to tokenize; for a conversation, the number of characters in its messages."""
    if isinstance(prompt, ChatPrompt):
        return sum(len(str(message.get("content"))) for message in prompt.messages)
    return len(prompt.text) if isinstance(prompt, TextPrompt) else 0
