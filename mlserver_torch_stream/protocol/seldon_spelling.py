"""Reads and writes the format of Seldon Core 2's OpenAI translator: the request's conversation is in parallel tensors,
and the reply has OpenAI's object in one tensor.

Seldon's proxy passes only the tensor ``output_all`` of a reply or an error to OpenAI's clients, and drops everything
else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.openai_objects import ChatCompletion
from mlserver_torch_stream.protocol.openai_stream import error_object, event_choice, failure_message
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext, RunningUsage, StreamEncoder, WholeEncoder
from mlserver_torch_stream.protocol.v2_names import MESSAGE_TENSORS
from mlserver_torch_stream.protocol.v2_reply import V2, StreamReply, UnaryReply, V2Tensors, output
from mlserver_torch_stream.types import FinishReason, GenerationRequest, ReplyOptions, TokenEvent


class SeldonChat(V2Tensors):
    """A chat in V2 tensors; the reply has the tensors ``role``, ``content``, ``type`` and ``output_all``."""

    keep_alive = b""  # the proxy parses every block of a stream as JSON
    outputs = frozenset({*V2Tensors.outputs, *names.CHAT_OUTPUT_DATATYPES})

    def accepts(self, body: Mapping[str, Any]) -> bool:
        inputs = body.get("inputs")
        tensors = inputs if isinstance(inputs, list) else []
        return has_message(str(tensor.get("name")) for tensor in tensors if isinstance(tensor, dict))

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return SeldonStreamReply(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return SeldonUnaryReply(request, context)

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        """Returns status and body: V2's ``error``, and OpenAI's error object in the tensor ``output_all``.

        For a body without ``outputs`` the proxy would send an empty answer with status 500.
        """
        status, body = super().refusal(error)
        message, field = error.message, error.field
        if field in names.PROMPT_TENSORS:  # the OpenAI client knows only ``messages``
            message, field = f"{names.MESSAGES}: {message.removeprefix(f'{field}: ')}", names.MESSAGES
        described = error_object(status, message, field, error.code)
        return status, {**body, "outputs": [_output_all({"error": described})]}


SELDON = SeldonChat()
_VERSION = re.compile("_[0-9]+$")


def spelling_of(inputs: Iterable[str]) -> V2Tensors:
    """Returns the spelling of a gRPC message whose input tensors have these names."""
    return SELDON if has_message(inputs) else V2


def has_message(inputs: Iterable[str]) -> bool:
    """Whether one of the input tensors is a message of Seldon's translator."""
    return any(name in MESSAGE_TENSORS for name in inputs)


def warning_of_name(name: str) -> str | None:
    """Returns a warning if Seldon's proxy would refuse every OpenAI request to a model of this name; else None.

    The proxy cuts a name at its first "_", because Seldon appends "_" and a version to the names of its models.
    """
    given = _VERSION.sub("", name)
    if "_" not in given:
        return None
    better = given.replace("_", "-")
    return f"behind Seldon Core 2, OpenAI clients cannot reach a model with '_' in its name; there, call it '{better}'"


class SeldonStreamReply(StreamReply):
    """V2 responses, each with one chat.completion.chunk, or with the error object of a sequence that has failed."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        super().__init__(request, context)
        self._chat = ChatCompletion(request.request_id, context.model_name, context.created)
        self._message_shown = _shown(request.reply)
        self._logprobs = request.sampling.logprobs
        self._usage_message = request.reply.usage_message
        self._running = RunningUsage(request) if request.reply.continuous_usage else None
        self._reason: FinishReason | None = None  # of the current event, one of OpenAI's reasons
        self._begun: set[int] = set()

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        self._reason = event.finish_reason if event.error is None else None
        bodies: list[JsonObject] = []
        for part in self._parts(event):
            bodies += super().event(part)
        return bodies

    def _parts(self, event: TokenEvent) -> Sequence[TokenEvent]:
        """Returns the event, or two events for its content and its end, because a message has room for either a chunk
        or the usage.
        """
        last = event.finish_reason is not None and len(self._progress.usage.unfinished) == 1
        if not (last and self._usage_message and event.error is None):
            return (event,)
        end = TokenEvent(event.index, finish_reason=event.finish_reason, usage=event.usage)
        return replace(event, finish_reason=None, usage=None), end

    def _tensors(self, event: TokenEvent, final: bool) -> list[JsonObject]:
        tensors = super()._tensors(event, final)
        after_text = int(names.TEXT_OUTPUT in self._shown)
        tensors[after_text:after_text] = _message_tensors([event.text], self._message_shown)
        if names.OUTPUT_ALL in self._message_shown:
            tensors.append(_output_all(self._openai_message(event, final)))
        self._begun.add(event.index)
        return tensors

    def _openai_message(self, event: TokenEvent, final: bool) -> JsonObject:
        if event.error is not None:
            return failure_message(event.error)
        if final and self._usage_message:
            return self._chat.usage_chunk(self._progress.usage)
        choice = event_choice(event, self._reason, event.logprobs if self._logprobs else None)
        usage = self._progress.usage if final else None
        chunk = self._chat.chunk(choice, first=event.index not in self._begun, usage=usage)
        if not self._usage_message:
            return chunk
        return {**chunk, "usage": None if self._running is None else self._running.before_and_after(event)[1]}


class SeldonUnaryReply(UnaryReply):
    """A V2 response with one chat.completion."""

    def _tensors(self) -> list[JsonObject]:
        shown = _shown(self._request.reply)
        choices = self.choices()
        tensors = super()._tensors() + _message_tensors([choice.text for choice in choices], shown)
        if names.OUTPUT_ALL in shown:
            chat = ChatCompletion(self._request.request_id, self._context.model_name, self._context.created)
            whole = chat.whole(choices, self.usage)
            tensors.append(_output_all(whole))
        return tensors


def _shown(reply: ReplyOptions) -> frozenset[str]:
    return frozenset(names.CHAT_OUTPUT_DATATYPES if reply.outputs is None else reply.outputs)


def _message_tensors(texts: list[str], shown: frozenset[str]) -> list[JsonObject]:
    count = len(texts)
    columns = {names.ROLE: ["assistant"] * count, names.CONTENT: texts, names.TYPE: ["text"] * count}
    return [output(name, data) for name, data in columns.items() if name in shown]


def _output_all(value: JsonObject) -> JsonObject:
    return output(names.OUTPUT_ALL, [orjson.dumps(value).decode()])
