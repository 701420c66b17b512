"""Reads the body of one REST request within a bound: decompressed, as JSON, or as the parts of a form.

Raw bytes of tensors may follow the JSON object: the header ``Inference-Header-Content-Length`` says where they begin.
How slowly a client may send is the HTTP server's limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.gunzip import PIECE_BYTES, Damaged, Gunzip
from mlserver_torch_stream.protocol.values import named, parse_bounded

JSON_LENGTH = "inference-header-content-length"
_LENGTH = re.compile(r"0*([0-9]{1,20})[ \t]*")  # white space after a header's value is no part of it
_CODINGS = ("identity", "gzip", "x-gzip")


class BodyTooLarge(RequestError):
    """The body, or what it unpacks to, is larger than the settings allow."""

    status = 413


class UnknownCoding(RequestError):
    """The body is packed otherwise than with gzip."""

    status = 415


class ClientLeft(Exception):
    """The client disconnected before its request was complete, so there is nothing to answer."""


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Raises RequestError or ClientLeft."""
    headers = Headers(scope=scope)
    _refuse_declared_size(headers, most_bytes)
    body = _decoder(headers, most_bytes)
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body.feed(message.get("body", b""))
        more = message.get("more_body", False)
    return body.whole()


def split_binary(headers: Headers, body: bytes) -> tuple[bytes, bytes]:
    """The JSON of a body, and the raw bytes of tensors after it. Raises InvalidInput."""
    declared = headers.get(JSON_LENGTH)
    if declared is None:
        return body, b""
    length = as_length(declared)
    if length is None or not 0 < length <= len(body):
        raise InvalidInput(JSON_LENGTH, f"must be from 1 to the body's {len(body)} bytes, got {declared[:20]!r}")
    return body[:length], body[length:]


def as_length(declared: str) -> int | None:
    """None if the text is not a number of bytes. Python cannot convert numbers of thousands of digits."""
    match = _LENGTH.fullmatch(declared)
    return None if match is None else int(match[1])


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises InvalidInput."""
    parsed = parse_json(raw)
    if not isinstance(parsed, dict):
        raise InvalidInput("body", f"must be a JSON object, got a {type(parsed).__name__}")
    return parsed


def parse_json(raw: bytes) -> Any:
    """Raises InvalidInput."""
    return named("body", parse_bounded, raw)


def _refuse_declared_size(headers: Headers, most_bytes: int) -> None:
    """Before anything is read, so that a client that waits for ``100 Continue`` sends nothing."""
    declared = as_length(headers.get("content-length", ""))
    if declared is not None and declared > most_bytes:
        raise _too_large(most_bytes)


def _decoder(headers: Headers, most_bytes: int) -> _Plain:
    coding = ", ".join(headers.getlist("content-encoding")).strip().lower() or "identity"
    if coding not in _CODINGS:
        raise UnknownCoding(f"content-encoding: {coding[:100]!r} is not implemented, only gzip")
    return _Plain(most_bytes) if coding == "identity" else _Gzip(most_bytes)


def _too_large(most_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"body: larger than {most_bytes} bytes after decompression")


class _Plain:
    """Collects a body up to its bound."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._collected = bytearray()

    def feed(self, chunk: bytes) -> None:
        self._collected += chunk
        if len(self._collected) > self._most:
            raise _too_large(self._most)

    def whole(self) -> bytes:
        return bytes(self._collected)


class _Gzip(_Plain):
    """Decompresses a gzip body, in pieces no larger than one byte over the bound.

    The packed body has the same bound, as many empty members unpack to nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self._packed = 0
        self._gunzip = Gunzip()

    def feed(self, chunk: bytes) -> None:
        self._packed += len(chunk)
        if self._packed > self._most:
            raise _too_large(self._most)
        try:
            for piece in self._gunzip.feed(chunk, min(PIECE_BYTES, self._most + 1 - len(self._collected))):
                super().feed(piece)
        except Damaged as error:
            raise InvalidInput("content-encoding", f"the body {error}") from None

    def whole(self) -> bytes:
        try:
            self._gunzip.end()
        except Damaged as error:
            raise InvalidInput("content-encoding", f"the body {error}") from None
        return super().whole()


_MAX_HEADER_BYTES = 8192  # of one part


@dataclass(frozen=True, slots=True)
class PartBegan:
    """``filename``: None for a part that is no file. ``content_type``: empty where the part names none."""

    name: str
    filename: str | None
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class PartPiece:
    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnded:
    """The part is complete."""


FormEvent = PartBegan | PartPiece | PartEnded


class FormReader:
    """``complete``: the last boundary was read. Raises InvalidInput if the body is not a form."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidInput("content-type", "must be multipart/form-data with a boundary")
        self.complete = False
        self._found: list[FormEvent] = []
        self._header_bytes = 0
        self._name, self._value, self._disposition, self._content_type = b"", b"", b"", b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": lambda data, start, end: self._found.append(PartPiece(data[start:end])),
                    "on_part_end": lambda: self._found.append(PartEnded()),
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidInput("content-type", f"its boundary is refused: {error}") from None

    def feed(self, chunk: bytes) -> Sequence[FormEvent]:
        """The events of the next bytes of the body."""
        self._found = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidInput("body", f"is not valid multipart/form-data: {error}") from None
        return self._found

    def _part_begin(self) -> None:
        self._header_bytes = 0
        self._name, self._value, self._disposition, self._content_type = b"", b"", b"", b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise InvalidInput("body", f"the headers of a part are longer than {_MAX_HEADER_BYTES} bytes")

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        elif self._name.lower() == b"content-type":
            self._content_type = self._value
        self._name, self._value = b"", b""

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidInput("body", "a part has no name: Content-Disposition: form-data; name=… is missing")
        filename = options.get(b"filename")
        shown = None if filename is None else filename.decode("utf-8", "replace")
        content_type = self._content_type.decode("latin-1").strip()
        self._found.append(PartBegan(options[b"name"].decode("utf-8", "replace"), shown, content_type))

    def _end(self) -> None:
        self.complete = True
