"""Turns rows into OpenAI's requests and the answers of servers into OpenAI's objects."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlserver_torch_stream.client.http_transport import error_message
from mlserver_torch_stream.cloud.naming import closed_format
from mlserver_torch_stream.cloud.rows import Failure, Kind, Outcome, Row
from mlserver_torch_stream.protocol.openai_batch import ChunkFold, check_model
from mlserver_torch_stream.protocol.openai_objects import ChatChoice, completion
from mlserver_torch_stream.protocol.openai_request import MESSAGES, PROMPT
from mlserver_torch_stream.protocol.openai_stream import BAD_REQUEST, error_object
from mlserver_torch_stream.protocol.responses_request import INPUT
from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls
from mlserver_torch_stream.types import TokenLogprob
from mlserver_torch_stream.v2_reader import read_reply

_RUNS_OWN = ("stream", "model")  # the run sets them; the rows were checked to agree


class RowUnsuitable(Exception):
    """The model cannot take this row."""


@dataclass(frozen=True, slots=True)
class RowQuestion:
    """One row as a request: ``messages`` or ``prompt``, and its parameters."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    parameters: dict[str, Any]

    @property
    def chat(self) -> bool:
        return self.messages is not None

    @property
    def body(self) -> dict[str, Any]:
        prompt = {MESSAGES: self.messages} if self.chat else {PROMPT: self.prompt}
        return {**prompt, **self.parameters}


@dataclass(frozen=True, slots=True)
class RowRequest:
    """How rows become requests. ``defaults``: parameters that a row may override; ``chat``: a text is a user's message;
    ``media``: images and sound may be parts of a message; ``served``: the model's names in rows.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    media: bool = False
    served: Collection[str] = ()

    def takes(self, kind: Kind) -> bool:
        return kind in (Kind.JSONL, Kind.TEXT) or (self.media and kind in (Kind.IMAGE, Kind.AUDIO))

    def ask(self, row: Row) -> RowQuestion:
        """The row's request. Raises RowUnsuitable or UnknownModel."""
        if not self.takes(row.kind):
            form = closed_format(row.key, row.kind)
            raise RowUnsuitable(f"{row.key}: the model takes no {form or row.kind.value}")
        if row.kind is Kind.TEXT:
            text = row.data.decode("utf-8-sig")
            body: dict[str, Any] = {MESSAGES: [{"role": "user", "content": text}]} if self.chat else {PROMPT: text}
        elif row.kind is Kind.JSONL:
            body = dict(row.body or {})
            check_model(body, self.served)
            if INPUT in body:
                raise RowUnsuitable(f"{INPUT}: rows of /v1/responses are for the batches of a server")
        else:
            body = {MESSAGES: [{"role": "user", "content": [_media(row)]}]}
        said = {key: value for key, value in body.items() if key not in (MESSAGES, PROMPT, *_RUNS_OWN)}
        return RowQuestion(body.get(PROMPT), body.get(MESSAGES), {**self.defaults, **said})


def _media(row: Row) -> dict[str, Any]:
    ending = row.key.rpartition(".")[2].lower()
    encoded = base64.b64encode(row.data).decode()
    if row.kind is Kind.IMAGE:
        kind = "jpeg" if ending == "jpg" else ending
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{encoded}"}}
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": ending}}


async def each(rows: Sequence[Row], one: Callable[[Row], Awaitable[Outcome]]) -> list[Outcome]:
    """Infers all rows concurrently. An exception of one row cancels the other rows and is raised."""
    tasks = [asyncio.ensure_future(one(row)) for row in rows]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def refused(code: str, message: str) -> Outcome:
    """The outcome of a row that was not sent to the model."""
    return Outcome(failure=Failure(code, message, BAD_REQUEST, error_object(BAD_REQUEST, message, code=code)))


DONE = "[DONE]"
_MAX_LEVELS = 500  # Python writes JSON of some 900 levels


class GenerationBroke(Exception):
    """The server reports that the generation failed. ``error``: its error object, if it sent an object."""

    def __init__(self, error: Any) -> None:
        self.error = error if isinstance(error, dict) else None
        super().__init__(error_message(error))


def parse(text: str | bytes) -> Any:
    """JSON as servers in Python write it: NaN and the infinities, of log-probabilities, are null, which all can read.

    Raises ValueError, also where it is nested so deeply that it could not be written again.
    """
    try:
        value = json.loads(text, parse_constant=lambda constant: None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _brackets(text) > _MAX_LEVELS and not _within_levels(value):
        raise ValueError("it is nested too deeply")
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
    """One answer while it arrives. Input that is no answer raises ValueError, KeyError, TypeError, IndexError or
    AttributeError."""

    prompt_tokens: int
    completion_tokens: int

    def whole(self, body: dict[str, Any]) -> None:
        """Takes the body of an answer that is not streamed."""

    def event(self, data: str) -> bool:
        """Takes one event of a stream; True for the last."""

    def body(self) -> dict[str, Any]:
        """The answer as OpenAI's object."""


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
        """True for the last event of a stream."""
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
