"""Reads a multipart form as it arrives, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mlserver_torch_stream.errors import InvalidInput

_MAX_HEADER_BYTES = 8192  # the headers of one part


@dataclass(frozen=True, slots=True)
class PartBegan:
    """A part begins. ``filename`` is None if the part is not a file. ``content_type`` is empty if the part does not
    name one.
    """

    name: str
    filename: str | None
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class PartPiece:
    """A piece of the content of a form's part."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnded:
    """The part is complete."""


FormEvent = PartBegan | PartPiece | PartEnded


class FormReader:
    """Parses a form. ``complete`` is true after the last boundary. Raises InvalidInput if the body is not a form."""

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
            raise InvalidInput("content-type", f"the boundary is not valid: {error}") from None

    def feed(self, chunk: bytes) -> Sequence[FormEvent]:
        """Returns the events in the next bytes of the body. Raises InvalidInput."""
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
