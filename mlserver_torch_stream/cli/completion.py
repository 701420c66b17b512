"""What a row asks for and what it gets, in OpenAI's spelling, whichever model answers.

Knows neither engines nor servers. A response bears no id and no time, so that equal answers are equal bytes.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.cloud.naming import closed_format
from mlserver_torch_stream.cloud.rows import Failure, Kind, Outcome, Row

PROMPTS = ("messages", "prompt", "text_input")
_SERVERS_OWN = ("stream", "stream_options", "model")  # a row does not choose how or by whom it is answered


class Unsuitable(Exception):
    """A row that this model cannot take, as it stands."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One row as a request: ``messages`` or ``prompt``, and the parameters beside it."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    parameters: dict[str, Any]

    @property
    def chat(self) -> bool:
        return self.messages is not None


@dataclass(frozen=True, slots=True)
class Asking:
    """How rows become requests: ``defaults`` are parameters for rows that do not say, ``chat`` makes texts messages,
    ``media`` allows images and sound as parts of a message."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    media: bool = False

    def takes(self, kind: Kind) -> bool:
        return kind in (Kind.JSONL, Kind.TEXT) or (self.media and kind in (Kind.IMAGE, Kind.AUDIO))

    def ask(self, row: Row, instruction: str = "") -> Ask:
        """Raises Unsuitable."""
        if not self.takes(row.kind):
            form = closed_format(row.key, row.kind)
            raise Unsuitable(f"{row.key}: the model takes no {form or row.kind.value}")
        if row.kind is Kind.TEXT:
            text = row.data.decode("utf-8-sig")
            body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        elif row.kind is Kind.JSONL:
            body = dict(row.body or {})
        else:
            body = {"messages": [{"role": "user", "content": [_media(row)]}]}
        parameters = {**self.defaults, **{key: value for key, value in body.items() if key not in PROMPTS}}
        for key in _SERVERS_OWN:
            parameters.pop(key, None)
        return Ask(body.get("prompt", body.get("text_input")), body.get("messages"), parameters)


def _media(row: Row) -> dict[str, Any]:
    ending = row.key.rpartition(".")[2].lower()
    encoded = base64.b64encode(row.data).decode()
    if row.kind is Kind.IMAGE:
        kind = "jpeg" if ending == "jpg" else ending
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{encoded}"}}
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": ending}}


@dataclass
class Answer:
    """An answer as it comes, in pieces, one text for each of its choices."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, index: int, text: str, reason: str | None = None) -> None:
        self.texts.setdefault(index, []).append(text)
        if reason is not None:
            self.reasons[index] = reason

    def outcome(self, model: str, chat: bool) -> Outcome:
        body = {
            "object": "chat.completion" if chat else "text_completion",
            "model": model,
            "choices": [self._choice(index, chat) for index in sorted(self.texts)],
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
        }
        return Outcome({"status_code": 200, "body": body}, None, self.prompt_tokens, self.completion_tokens)

    def _choice(self, index: int, chat: bool) -> dict[str, Any]:
        text = "".join(self.texts[index])
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"index": index, **said, "finish_reason": self.reasons.get(index)}


async def each(rows: Sequence[Row], one: Callable[[Row], Awaitable[Outcome]]) -> list[Outcome]:
    """All rows at once. What one of them raises ends the others."""
    tasks = [asyncio.ensure_future(one(row)) for row in rows]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def failed(code: str, message: str) -> Outcome:
    return Outcome(failure=Failure(code, message))
