"""Turns the answers of servers into the bodies of output rows: OpenAI's objects, or predictions of handlers."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from mlserver_torch_stream.client.http_transport import error_message
from mlserver_torch_stream.cloud.parse import MAX_ANSWER_BYTES, PREDICTIONS
from mlserver_torch_stream.cloud.rows import Failure, Outcome
from mlserver_torch_stream.protocol.openai_batch import ChunkFold
from mlserver_torch_stream.protocol.openai_objects import ChatChoice, completion
from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls
from mlserver_torch_stream.types import TokenLogprob
from mlserver_torch_stream.v2_reader import read_reply

DONE = "[DONE]"
_MAX_LEVELS = 500  # the maximum depth of nesting; Python's JSON writer fails beyond about 900
_TOO_DEEP = f"the JSON is nested too deeply; at most {_MAX_LEVELS} levels are allowed"


class GenerationBroke(Exception):
    """The server reports that the generation failed. ``error`` is the server's error object, if it sent one."""

    def __init__(self, error: Any) -> None:
        self.error = error if isinstance(error, dict) else None
        super().__init__(error_message(error))


def parse(text: str | bytes) -> Any:
    """Parses JSON. NaN and infinities, which servers in Python write for some log-probabilities, become None.

    Raises ValueError if the text is not JSON, or if the value is nested too deeply to be written as JSON again.
    """
    try:
        value = json.loads(text, parse_constant=lambda constant: None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _brackets(text) > _MAX_LEVELS and not _within_levels(value):
        raise ValueError(_TOO_DEEP)
    return value


def _brackets(text: str | bytes) -> int:
    return text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")


def _within_levels(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for values in inner for each in values]
        if not level:
            return True
    return False


class HttpAnswer(Protocol):
    """Collects one answer while it arrives. ``body`` sets the token counts if the answer has any.

    Input that is not an answer raises ValueError, KeyError, TypeError, IndexError or AttributeError.
    """

    prompt_tokens: int
    completion_tokens: int

    def whole(self, body: dict[str, Any]) -> None:
        """Reads the body of an answer that is not streamed."""

    def event(self, data: str) -> bool:
        """Reads one event of a stream. Returns True for the last event."""

    def body(self) -> dict[str, Any]:
        """Returns the answer as OpenAI's object."""


@dataclass
class OpenAIAnswer:
    """An answer of OpenAI's API; unknown fields are kept."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    _whole: dict[str, Any] | None = None
    _fold: ChunkFold = field(default_factory=ChunkFold)

    def whole(self, body: dict[str, Any]) -> None:
        self._check(body)
        self._whole = body

    def event(self, data: str) -> bool:
        if data == DONE:
            return True
        chunk = parse(data)
        self._check(chunk)
        self._fold.add(chunk)
        return False

    def body(self) -> dict[str, Any]:
        body = self._fold.whole() if self._whole is None else self._whole
        usage = body.get("usage") or {}
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        return body

    @staticmethod
    def _check(body: Mapping[str, Any]) -> None:
        if body.get("error"):
            raise GenerationBroke(body["error"])
        for choice in body["choices"]:
            choice["index"]


@dataclass
class V2ServerAnswer:
    """An answer of the V2 protocol: texts, reasoning, calls, finish reasons, log-probabilities and token counts."""

    model: str
    chat: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # V2 replies do not have these two counts
    reasoning_tokens: int = 0
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _reasoning: dict[int, str] = field(default_factory=dict)
    _calls: dict[int, tuple[ToolCallDelta, ...]] = field(default_factory=dict)
    _reasons: dict[int, str] = field(default_factory=dict)
    _logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def whole(self, body: dict[str, Any]) -> None:
        self._add(body)

    def event(self, data: str) -> bool:
        return self._add(parse(data))

    def body(self) -> dict[str, Any]:
        return completion(self.chat, self.model, [self._choice(index) for index in sorted(self._texts)], self)

    def _choice(self, index: int) -> ChatChoice:
        text, reason, logprobs = "".join(self._texts[index]), self._reasons.get(index), self._logprobs.get(index)
        return ChatChoice(index, text, reason, logprobs, self._reasoning.get(index, ""), self._calls.get(index, ()))

    def _add(self, body: Mapping[str, Any]) -> bool:
        """Adds an event or a whole response. Returns True for the last event of a stream."""
        reply = read_reply(body)
        if reply.error is not None:
            raise GenerationBroke(reply.error)
        for sequence in reply.sequences:
            if sequence.text is not None:
                self._texts.setdefault(sequence.index, []).append(sequence.text)
            if sequence.reasoning:
                self._reasoning[sequence.index] = self._reasoning.get(sequence.index, "") + sequence.reasoning
            if sequence.tool_calls:
                self._calls[sequence.index] = join_calls((*self._calls.get(sequence.index, ()), *sequence.tool_calls))
            if sequence.finish_reason is not None:
                self._reasons[sequence.index] = sequence.finish_reason
            if sequence.logprobs is not None:
                self._logprobs.setdefault(sequence.index, []).extend(sequence.logprobs)
            self.prompt_tokens = max(self.prompt_tokens, sequence.num_input_tokens or 0)
            self.completion_tokens += sequence.num_output_tokens or 0
        return reply.final


def _count(said: Any) -> int:
    return said if isinstance(said, int) else 0


_JSON = "application/json"
_MAX_PIECES = 1 << 18  # each takes about 500 bytes of memory in addition to its content


class AnswerTooLarge(Exception):
    """The answer to one row is too large to be held in memory."""


class PieceCollector:
    """Collects the pieces of one answer. Their number and their total size are limited."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes, str]] = []
        self._bytes = 0

    def add(self, value: bytes, content_type: str) -> None:
        """Adds a piece. Raises AnswerTooLarge if the answer has too many pieces or bytes."""
        self._bytes += len(value)
        if self._bytes > MAX_ANSWER_BYTES:
            raise AnswerTooLarge(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        if len(self.found) == _MAX_PIECES:
            raise AnswerTooLarge(f"the answer has more than {_MAX_PIECES} pieces")
        self.found.append((value, content_type))

    async def read(self, content: aiohttp.StreamReader, content_type: str) -> None:
        """Adds each chunk of a body as a piece. A body that is not chunked is one piece. Raises AnswerTooLarge as
        ``add``.
        """
        piece = bytearray()
        async for data, ends in content.iter_chunks():
            piece += data
            if len(piece) > MAX_ANSWER_BYTES:
                raise AnswerTooLarge(f"a piece of the answer is larger than {MAX_ANSWER_BYTES} bytes")
            if ends:
                self.add(bytes(piece), content_type)
                piece = bytearray()
        if piece or not self.found:
            self.add(bytes(piece), content_type)


def predicted(
    pieces: Sequence[tuple[bytes, str]], apart: bool = False, span: tuple[float, float] | None = None
) -> Outcome:
    """Returns the outcome of an answer that consists of ``pieces``: one or more values, each with a content type.

    With ``apart`` each piece becomes a separate output line.
    """
    if apart:
        return Outcome(span=span, pieces=[_prediction_body(value, content_type) for value, content_type in pieces])
    return Outcome(_prediction_body(b"".join(value for value, _ in pieces), pieces[0][1]), span=span)


def answer_too_large(reason: str) -> Outcome:
    """Returns the outcome of a row whose answer is too large to be held in memory. ``reason`` names the limit."""
    return Outcome(failure=Failure("too_large", reason))


def _prediction_body(value: bytes, content_type: str) -> dict[str, Any]:
    return {
        "object": "prediction",
        "content_type": content_type or None,
        PREDICTIONS: [_prediction(value, content_type)],
    }


def _prediction(value: bytes, content_type: str) -> Any:
    """Returns parsed JSON, text as a string, or other bytes as ``{"base64": …}``.

    Handlers seldom name a content type, so an answer without one counts as JSON if it can be parsed.
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind in ("", _JSON):
            return parse(value)
    except ValueError:
        pass
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
