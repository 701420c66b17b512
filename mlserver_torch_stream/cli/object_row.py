"""Turns a whole object, or a chunk of one, into a request for a handler, and the answer into the body of an output row.

What a request says beside its bytes is in headers, where handlers read it.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mlserver_torch_stream.cli.answers_http import parse
from mlserver_torch_stream.cloud.parse import MAX_ANSWER_BYTES, PREDICTIONS
from mlserver_torch_stream.cloud.rows import Failure, Outcome, Row

_BYTES = "application/octet-stream"
_JSON = "application/json"
_MAX_PIECES = 1 << 18  # each takes some 500 bytes of memory beside its own
_TYPES = mimetypes.MimeTypes()  # Python's own list, not the machine's


class AnswerTooLarge(Exception):
    """The answer to one row is larger than is held in memory."""


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """How rows become requests. Every request has the ``headers``. ``pieces``: each piece of an answer becomes a
    row."""

    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: bool = False

    def request_id(self, row: Row) -> str:
        """The same in every run over the same objects."""
        return quote(row.key) if row.chunk is None else f"{quote(row.key)}#{row.chunk.index}"

    def content_type(self, row: Row) -> str:
        """Returns the type of the key's ending; bytes for a chunk, because it may begin anywhere in the object."""
        kind, packed = _TYPES.guess_type(row.key.rpartition("/")[2])
        return _BYTES if kind is None or packed is not None or row.chunk is not None else kind

    def all_headers(self, row: Row) -> dict[str, str]:
        chunk = row.chunk
        index, offset, last = (0, 0, True) if chunk is None else (chunk.index, chunk.offset, chunk.last)
        return {
            **self.headers,
            "x-object-key": quote(row.key),
            "x-object-size": str(row.whole),
            "x-chunk-index": str(index),
            "x-chunk-offset": str(offset),
            "x-chunk-last": "true" if last else "false",
        }

    def outcome(self, pieces: Sequence[tuple[bytes, str]], span: tuple[float, float] | None = None) -> Outcome:
        """``pieces``: the values of the answer's pieces, at least one, and their content types."""
        if self.pieces:
            return Outcome(span=span, pieces=[_body(value, content_type) for value, content_type in pieces])
        return Outcome(_body(b"".join(value for value, _ in pieces), pieces[0][1]), span=span)


class PieceCollector:
    """The pieces of one answer, within a bound."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes, str]] = []
        self._bytes = 0

    def add(self, value: bytes, content_type: str) -> None:
        """Raises AnswerTooLarge."""
        self._bytes += len(value)
        if self._bytes > MAX_ANSWER_BYTES:
            raise AnswerTooLarge(f"the answer is more than {MAX_ANSWER_BYTES} bytes")
        if len(self.found) == _MAX_PIECES:
            raise AnswerTooLarge(f"the answer has more than {_MAX_PIECES} pieces")
        self.found.append((value, content_type))


def answer_too_large(error: AnswerTooLarge) -> Outcome:
    return Outcome(failure=Failure("too_large", str(error)))


def _body(value: bytes, content_type: str) -> dict[str, Any]:
    return {
        "object": "prediction",
        "content_type": content_type or None,
        PREDICTIONS: [_prediction(value, content_type)],
    }


def _prediction(value: bytes, content_type: str) -> Any:
    """JSON as it is, text as a string, and other bytes as ``{"base64": …}``. Handlers seldom name a content type, so
    that an answer without one is JSON if it can be read as such."""
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
