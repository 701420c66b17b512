"""Turns rows into requests: makes bodies of OpenAI's API from prompts, and headers for whole objects and chunks."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mlserver_torch_stream.cloud.naming import closed_format
from mlserver_torch_stream.cloud.rows import Kind, Row
from mlserver_torch_stream.protocol.openai_batch import check_model
from mlserver_torch_stream.protocol.openai_request import MESSAGES, PROMPT
from mlserver_torch_stream.protocol.parameters import SILENT_IN_BODY
from mlserver_torch_stream.protocol.responses_request import INPUT

_RUNS_OWN = ("stream", "model")  # the run sets them; the rows were checked to agree


class RowUnsuitable(Exception):
    """The model cannot process this row."""


@dataclass(frozen=True, slots=True)
class RowQuestion:
    """One row as a request: ``messages`` or ``prompt``, and its parameters."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    parameters: dict[str, Any]

    @property
    def chat(self) -> bool:
        """Whether the row is a conversation rather than a prompt."""
        return self.messages is not None

    @property
    def path(self) -> str:
        """The path of OpenAI's API to which the request is sent."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        """The request body in the format of OpenAI's API, without the model's name."""
        prompt = {MESSAGES: self.messages} if self.chat else {PROMPT: self.prompt}
        return {**prompt, **self.parameters}

    @property
    def v2_parameters(self) -> dict[str, Any]:
        """The parameters that V2 has: OpenAI's API also has parameters that change nothing."""
        return {key: value for key, value in self.parameters.items() if key not in SILENT_IN_BODY}


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Says how rows become requests.

    ``defaults`` are parameters that a row may override; ``chat`` means that a text is a user's message; ``media`` means
    that images and sound may be parts of a message; ``served`` are the names that rows may use for the model.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    media: bool = False
    served: Collection[str] = ()

    def takes(self, kind: Kind) -> bool:
        return kind in (Kind.JSONL, Kind.TEXT) or (self.media and kind in (Kind.IMAGE, Kind.AUDIO))

    def ask(self, row: Row) -> RowQuestion:
        """Returns the row's request. Raises RowUnsuitable if the model does not accept such rows, and UnknownModel if
        the row names another model.
        """
        if not self.takes(row.kind):
            name = row.key if row.member is None else f"{row.key}/{row.member.name}"
            form = closed_format(name, row.kind)
            raise RowUnsuitable(f"{name}: the model does not accept {form or row.kind.value}")
        if row.kind is Kind.TEXT:
            text = row.data.decode("utf-8-sig")
            body: dict[str, Any] = {MESSAGES: [{"role": "user", "content": text}]} if self.chat else {PROMPT: text}
        elif row.kind is Kind.JSONL:
            body = dict(row.body or {})
            check_model(body, self.served)
            if INPUT in body:
                raise RowUnsuitable(f"{INPUT}: rows for /v1/responses are supported only in a server's batches")
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


_BYTES = "application/octet-stream"
_TYPES = mimetypes.MimeTypes()  # Python's own list, not the machine's


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """Says how objects and chunks become requests. Every request has the ``headers``.

    With ``pieces`` each piece of an answer becomes an output row.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: bool = False

    def request_id(self, row: Row) -> str:
        """Returns an id that is the same in every run over the same objects."""
        place = row.key if row.line is None and row.member is None else row.custom_id
        return quote(place) if row.chunk is None else f"{quote(place)}#{row.chunk.index}"

    def content_type(self, row: Row) -> str:
        """Returns the content type for the ending of the key or member; for a chunk, the type of plain bytes.

        A chunk has no other type because it may begin anywhere in the object.
        """
        if row.content_type is not None:
            return row.content_type
        name = row.key if row.member is None else row.member.name
        kind, packed = _TYPES.guess_type(name.rpartition("/")[2])
        return _BYTES if kind is None or packed is not None or row.chunk is not None else kind

    def all_headers(self, row: Row) -> dict[str, str]:
        """Returns the headers that describe a row's object or chunk, and the headers of the run."""
        chunk = row.chunk
        index, offset, last = (0, 0, True) if chunk is None else (chunk.index, chunk.offset, chunk.last)
        place = {} if row.line is None else {"x-object-line": str(row.line)}
        if row.member is not None:
            place["x-object-member"] = quote(row.member.name, errors="replace")
        return {
            **self.headers,
            **place,
            "x-object-key": quote(row.key),
            "x-object-size": str(row.whole),
            "x-chunk-index": str(index),
            "x-chunk-offset": str(offset),
            "x-chunk-last": "true" if last else "false",
        }
