"""Writes token events as a reply of Anthropic's Messages API: the events of a stream, or one whole message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.errors import ContextLengthExceeded, RequestError, as_request_error
from mlserver_torch_stream.protocol.openai_stream import openai_status, raise_failure
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext, UsageCounter, shortened
from mlserver_torch_stream.protocol.values import parse_json
from mlserver_torch_stream.types import FinishReason, GenerationRequest, TokenEvent

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
_TEXT, _THINKING, _CALL = "text", "thinking", "tool_use"
_DELTAS = {_TEXT: ("text_delta", "text"), _THINKING: ("thinking_delta", "thinking")}
_DELTAS[_CALL] = ("input_json_delta", "partial_json")


def error_body(error: RequestError) -> tuple[int, JsonObject]:
    """Returns the HTTP status and the body of an error."""
    status = openai_status(error.status)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {message}"  # these words make Claude Code compact its conversation
    return status, {"type": "error", "error": {"type": kind, "message": message}}


@dataclass(slots=True)
class _Block:
    """One content block while it grows. ``call`` is its index among the answer's tool calls; -1 for other blocks."""

    kind: str
    shown: JsonObject
    call: int = -1
    pieces: list[str] = field(default_factory=list)

    def whole(self) -> JsonObject:
        """Returns the complete block. A tool call that was cut off gets an empty input."""
        said = "".join(self.pieces)
        if self.kind != _CALL:
            return {**self.shown, self.kind: said}
        try:
            arguments = parse_json(said or "{}")
        except ValueError:
            arguments = None
        return {**self.shown, "input": arguments if isinstance(arguments, dict) else {}}


class MessagesStream:
    """The events of one streamed message."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._usage = UsageCounter(request)
        self._max_tokens = request.sampling.max_tokens
        self._signature = request.request_id  # clients drop a thinking block without a signature
        self._head: JsonObject = {"id": f"msg_{request.request_id}", "type": "message", "role": "assistant"}
        self._head["model"] = context.model_name
        self._blocks: list[_Block] = []
        self._end: JsonObject = {"stop_reason": None, "stop_sequence": None}
        self._begun = False

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """Returns the stream's events for one token event. Raises RequestError if the sequence has failed."""
        raise_failure(event)
        messages = [*self._begin(event), *self._grow(event)]
        if self._usage.note(event):
            self._end = self._reason(event)
            delta = {"type": "message_delta", "delta": self._end, "usage": self._counts()}
            messages += [*self._close(), delta, {"type": "message_stop"}]
        return messages

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        if not self._usage.unfinished:
            return ()
        _, body = error_body(as_request_error(error))
        body["error"]["message"] = shortened(body["error"]["message"])
        return (body,)

    def end(self) -> bytes | None:
        return None

    def whole(self) -> JsonObject:
        """Returns the complete message, after the last token event."""
        return self._message([block.whole() for block in self._blocks], self._counts())

    def _message(self, content: list[JsonObject], usage: JsonObject) -> JsonObject:
        return {**self._head, "content": content, **self._end, "usage": usage}

    def _begin(self, event: TokenEvent) -> Iterator[JsonObject]:
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": event.num_input_tokens, "output_tokens": 0}
            yield {"type": "message_start", "message": self._message([], usage)}
            yield {"type": "ping"}

    def _grow(self, event: TokenEvent) -> Iterator[JsonObject]:
        """Yields the stream's events for a token event: its reasoning, then its text, then its calls."""
        if event.reasoning:
            yield from self._add(_THINKING, event.reasoning, {"thinking": "", "signature": ""})
        if event.text:
            yield from self._add(_TEXT, event.text, {"text": ""})
        for call in event.tool_calls:
            shown: JsonObject = {"id": call.id, "name": call.name, "input": {}}
            yield from self._add(_CALL, call.arguments, shown, call.index)

    def _add(self, kind: str, said: str, shown: JsonObject, call: int = -1) -> Iterator[JsonObject]:
        """Adds to the last block. Ends the last block and begins a new one if the kind or the tool call has changed."""
        if not self._blocks or (self._blocks[-1].kind, self._blocks[-1].call) != (kind, call):
            yield from self._close()
            self._blocks.append(_Block(kind, {"type": kind, **shown}, call))
            yield self._of_block("start", content_block=self._blocks[-1].shown)
        if said:
            self._blocks[-1].pieces.append(said)
            delta, key = _DELTAS[kind]
            yield self._of_block("delta", delta={"type": delta, key: said})

    def _close(self) -> Iterator[JsonObject]:
        if not self._blocks:
            return
        if self._blocks[-1].kind == _THINKING:
            self._blocks[-1].shown = {**self._blocks[-1].shown, "signature": self._signature}
            yield self._of_block("delta", delta={"type": "signature_delta", "signature": self._signature})
        yield self._of_block("stop")

    def _of_block(self, kind: str, **more: Any) -> JsonObject:
        return {"type": f"content_block_{kind}", "index": len(self._blocks) - 1, **more}

    def _counts(self) -> JsonObject:
        """Returns ``usage``. As in Anthropic's API, ``input_tokens`` leaves out tokens from the prefix cache."""
        cached = self._usage.cached_tokens
        return {
            "input_tokens": self._usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._usage.reasoning_tokens},
        }

    def _reason(self, event: TokenEvent) -> JsonObject:
        if event.finish_reason is FinishReason.TOOL_CALLS:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if event.finish_reason is FinishReason.LENGTH:
            filled = self._max_tokens is None or self._usage.completion_tokens < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if filled else "max_tokens", "stop_sequence": None}
        if isinstance(event.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": event.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


class MessagesWhole:
    """The message of a request that is not streamed."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._stream = MessagesStream(request, context)

    def add(self, event: TokenEvent) -> None:
        """Adds a token event. Raises RequestError if the sequence has failed."""
        self._stream.event(event)

    def body(self) -> JsonObject:
        return self._stream.whole()
