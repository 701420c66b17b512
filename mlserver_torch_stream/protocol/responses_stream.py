"""Writes token events as a reply of OpenAI's Responses API: the events of a stream, or one whole response.

Messages are bounded in length, except those that repeat a whole text or response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from mlserver_torch_stream.errors import as_request_error
from mlserver_torch_stream.protocol.custom_tools import NamedTool, named_tools
from mlserver_torch_stream.protocol.openai_objects import logprob_entries
from mlserver_torch_stream.protocol.openai_stream import describe, raise_failure
from mlserver_torch_stream.protocol.responses_objects import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    CallItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponseObject,
    warning_item,
)
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext, UsageCounter, shortened
from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import FinishReason, GenerationRequest, TokenEvent

_TOO_LONG = "max_output_tokens"
_Textual = TypeVar("_Textual", MessageItem, ReasoningItem)


class ResponsesStream:
    """The events of one streamed response, numbered from 0."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        repeated = request.reply.repeated
        self._id = request.request_id
        self._response = ResponseObject(self._id, context.model_name, context.created, repeated)
        self._tools = named_tools(repeated.get("tools", ()))
        self._warnings = request.reply.warnings
        self._usage = UsageCounter(request)
        self._shows_logprobs = request.sampling.logprobs
        self._logprobs: list[JsonObject] = []  # entries that no message has contained yet
        self._output: list[JsonObject] = []  # the completed items
        self._open: OutputItem | None = None
        self._call = -1  # the open item's index among the calls
        self._number = 0

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """Returns the messages of one token event. Raises RequestError if the sequence has failed."""
        raise_failure(event)
        messages = [*self._begin(), *self._grow(event)]
        if self._usage.note(event):
            messages += self._finish(event.finish_reason)
        return self._numbered(messages)

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        """Returns a failed response with the text so far, then the error event, for which SDKs raise an exception."""
        if not self._usage.unfinished:
            return ()
        _, described = describe(as_request_error(error))
        described["message"] = shortened(described["message"])
        told = {"code": described["code"] or described["type"], "message": described["message"]}
        output = [*self._output, *([self._open.shown(INCOMPLETE)] if self._open is not None else [])]
        failed = self._response.state("failed", output, error=told)
        return self._numbered(
            [
                *self._begin(),
                {"type": "response.failed", "response": failed},
                {"type": "error", **told, "param": described["param"], "error": described},
            ]
        )

    def end(self) -> bytes | None:
        return None

    def _begin(self) -> list[JsonObject]:
        if self._number:
            return []
        begun = self._response.state(IN_PROGRESS)
        messages = [{"type": f"response.{state}", "response": begun} for state in ("created", IN_PROGRESS)]
        for warning in self._warnings:
            item = warning_item(self._id, len(self._output), warning)
            places: JsonObject = {"output_index": len(self._output), "item": item}
            messages += [{"type": f"response.output_item.{kind}", **places} for kind in ("added", "done")]
            self._output.append(item)
        return messages

    def _grow(self, event: TokenEvent) -> Iterable[JsonObject]:
        """Yields the messages of a token event: its reasoning, then its text, then its calls."""
        if self._shows_logprobs:
            self._logprobs += logprob_entries(event.logprobs)
        if event.reasoning:
            reasoning, opened = self._opened(ReasoningItem)
            yield from opened
            yield reasoning.delta(event.reasoning)
        if event.text:
            yield from self._say(event.text)
        for call in event.tool_calls:
            yield from self._part_of(call)

    def _say(self, text: str) -> list[JsonObject]:
        message, opened = self._opened(MessageItem)
        logprobs, self._logprobs = self._logprobs, []
        return [*opened, message.say(text, logprobs)]

    def _part_of(self, delta: ToolCallDelta) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if not isinstance(self._open, CallItem) or self._call != delta.index:
            self._call = delta.index
            name = delta.name or ""
            tool = self._tools.get(name, NamedTool(name, None, False))
            kind = CustomCallItem if tool.custom else CallItem
            messages += self._switch(kind(self._id, self._next(), delta.id or "", tool.name, tool.namespace))
        assert isinstance(self._open, CallItem)
        return [*messages, *self._open.delta(delta.arguments)]

    def _opened(self, kind: type[_Textual]) -> tuple[_Textual, list[JsonObject]]:
        """Returns an open item of this kind, and the messages that open it if it is new."""
        if isinstance(self._open, kind):
            return self._open, []
        item = kind(self._id, self._next())
        return item, self._switch(item)

    def _switch(self, item: OutputItem) -> list[JsonObject]:
        closed = self._close(COMPLETED)
        self._open = item
        return [*closed, *item.begin()]

    def _close(self, status: str) -> list[JsonObject]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._output.append(item.shown(status))
        return item.end(status)

    def _next(self) -> int:
        """Returns the next item's position in the output."""
        return len(self._output) + (self._open is not None)

    def _finish(self, reason: FinishReason | None) -> list[JsonObject]:
        """Returns the messages that end the response; an empty answer gets a message item without text."""
        messages = [] if self._next() > len(self._warnings) else self._opened(MessageItem)[1]
        cut = reason is FinishReason.LENGTH
        status = INCOMPLETE if cut else COMPLETED
        messages += self._close(status)
        why = _TOO_LONG if cut else None
        ended = self._response.state(status, self._output, usage=self._usage, incomplete=why)
        return [*messages, {"type": f"response.{status}", "response": ended}]

    def _numbered(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        numbered = [{**each, "sequence_number": number} for number, each in enumerate(messages, self._number)]
        self._number += len(numbered)
        return numbered


class ResponsesWhole:
    """The reply to a request that is not streamed: the same response that would end a stream."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._stream = ResponsesStream(request, context)
        self._last: JsonObject = {}

    def add(self, event: TokenEvent) -> None:
        """Adds a token event. Raises RequestError if the sequence has failed."""
        for message in self._stream.event(event):
            self._last = message

    def body(self) -> JsonObject:
        response: JsonObject = self._last["response"]
        return response
