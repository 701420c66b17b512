"""Writes token events as chunks or as one whole object of OpenAI's API, and errors as its error object.

A sequence that fails ends the whole request, because OpenAI's objects have no finish reason for it and its clients stop
at the first error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, RequestError, as_request_error
from mlserver_torch_stream.protocol.openai_objects import ChatChoice, ChatCompletion, TextCompletion, shown_length
from mlserver_torch_stream.protocol.spelling import (
    CollectedReply,
    JsonObject,
    ReplyContext,
    RunningUsage,
    UsageCounter,
    shortened,
)
from mlserver_torch_stream.types import FAILURES, FinishReason, GenerationRequest, TokenEvent, TokenLogprob

BAD_REQUEST = 400


def openai_status(status: int) -> int:
    """Converts V2's status to OpenAI's: for bad input V2 has 422, and OpenAI 400."""
    return BAD_REQUEST if status == InvalidInput.status else status


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the object under the key ``error`` of a body."""
    return {"message": message, "type": _kind(status), "param": param, "code": code}


def describe(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Returns OpenAI's status and error object for an error."""
    status = openai_status(error.status)
    return status, error_object(status, error.message, error.field, error.code)


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


_DONE = b"[DONE]"


def event_choice(event: TokenEvent, reason: FinishReason | None, logprobs: Sequence[TokenLogprob] | None) -> ChatChoice:
    """Returns the content of an event as a choice of OpenAI's objects."""
    text = event.prompt_text + event.text
    return ChatChoice(event.index, text, reason, logprobs, event.reasoning, event.tool_calls)


class OpenAIStream(ABC):
    """Turns the token events of one streamed request into the chunks that the client reads."""

    def __init__(self, request: GenerationRequest, builder: ChatCompletion | TextCompletion) -> None:
        self._usage = UsageCounter(request)
        self._usage_chunk = builder.usage_chunk
        self._logprobs = request.sampling.logprobs
        self._usage_message = request.reply.usage_message
        self._running = RunningUsage(request) if request.reply.continuous_usage else None
        self._token_ids = request.reply.token_ids
        self._begun: set[int] = set()  # the choices that have had a chunk
        self._failed = False

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """Returns the chunks of one token event. Raises RequestError if the sequence has failed."""
        raise_failure(event)
        last = self._usage.note(event)
        choice = self._choice(event)
        chunks: Sequence[JsonObject] = () if choice is None else self._chunks(choice)
        if not self._usage_message:
            return chunks
        before, after = (None, None) if self._running is None else self._running.before_and_after(event)
        chunks = [{**chunk, "usage": before if chunk is not chunks[-1] else after} for chunk in chunks]
        return [*chunks, self._usage_chunk(self._usage)] if last else chunks

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        if not self._usage.unfinished:
            return ()
        self._failed = True
        return (failure_message(error),)

    def end(self) -> bytes | None:
        return None if self._failed else _DONE

    def _choice(self, event: TokenEvent) -> ChatChoice | None:
        """Returns the event's choice; None if the event has nothing that a chunk shows."""
        logprobs = (event.prompt_logprobs + event.logprobs or None) if self._logprobs else None
        ids = event.token_ids if self._token_ids else None
        if not event.has_output and logprobs is None and event.finish_reason is None and not ids:
            return None
        choice = event_choice(event, event.finish_reason, logprobs)
        if ids is not None:
            choice.token_ids, choice.prompt_ids = ids, None if event.index in self._begun else event.prompt_ids
        return choice

    @abstractmethod
    def _chunks(self, choice: ChatChoice) -> list[JsonObject]: ...


class ChatStream(OpenAIStream):
    """The chunks of a chat completion. The first chunk of each choice has its role."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._chat = ChatCompletion(request.request_id, context.model_name, context.created)
        super().__init__(request, self._chat)

    def _chunks(self, choice: ChatChoice) -> list[JsonObject]:
        if choice.index in self._begun:
            return [self._chat.chunk(choice, first=False, usage=None)]
        self._begun.add(choice.index)
        role = ChatChoice(choice.index, "", None, prompt_ids=choice.prompt_ids)
        choice.prompt_ids = None
        return [self._chat.chunk(role, first=True, usage=None), self._chat.chunk(choice, first=False, usage=None)]


class CompletionStream(OpenAIStream):
    """The chunks of a completion. The characters of each choice's tokens are counted, for ``text_offset``."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._completion = TextCompletion(request.request_id, context.model_name, context.created)
        super().__init__(request, self._completion)
        self._offsets = [0] * len(self._usage.unfinished)

    def _chunks(self, choice: ChatChoice) -> list[JsonObject]:
        chunk = self._completion.chunk(choice, self._offsets[choice.index])
        self._begun.add(choice.index)
        if choice.logprobs is not None:
            self._offsets[choice.index] += shown_length(choice.logprobs)
        return [chunk]


class OpenAIWhole:
    """Collects the token events of a request that is not streamed, and builds the one object of the reply."""

    def __init__(self, request: GenerationRequest, builder: ChatCompletion | TextCompletion) -> None:
        self._collected = CollectedReply(request)
        self._builder = builder

    def add(self, event: TokenEvent) -> None:
        """Adds a token event. Raises RequestError if the sequence has failed."""
        raise_failure(event)
        self._collected.add(event)

    def body(self) -> JsonObject:
        return self._builder.whole(self._collected.choices(), self._collected.usage)


def failure_message(error: Exception) -> JsonObject:
    """Returns the message that ends a stream that has failed."""
    _, described = describe(as_request_error(error))
    return {"error": {**described, "message": shortened(described["message"])}}


def raise_failure(event: TokenEvent) -> None:
    """Raises RequestError if the event ends its sequence with a failure."""
    if event.error is not None:
        raise as_request_error(event.error)
    if event.finish_reason in FAILURES:
        raise GenerationFailed(f"the generation ended with {event.finish_reason.value}")
