"""Turns rows into requests in OpenAI's spelling, and infers the rows of a batch concurrently.

Knows neither engines nor servers.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.cloud.naming import closed_format
from mlserver_torch_stream.cloud.rows import Failure, Kind, Outcome, Row
from mlserver_torch_stream.protocol.openai_batch import check_model
from mlserver_torch_stream.protocol.openai_error import BAD_REQUEST, error_object
from mlserver_torch_stream.protocol.openai_request import MESSAGES, PROMPT
from mlserver_torch_stream.protocol.responses_parameters import INPUT

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
