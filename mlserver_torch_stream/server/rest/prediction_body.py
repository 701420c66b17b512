"""Reads the fields of a body that was posted to TorchServe's paths: a form's fields, or the one field ``body``.

Knows nothing of what the fields mean to a handler.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.rest.form_reader import FormEvent, FormReader, PartBegan, PartPiece

MAX_FIELDS = 1000
_AT_ONCE = 64 * 1024  # bytes of a form that are read before other requests have their turn
_URL_ENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
_OF_FILES = "application/octet-stream"  # where a file names no content type


@dataclass(frozen=True, slots=True)
class BodyField:
    """``content_type`` has no parameters; it is empty where the client has named none."""

    name: str
    content_type: str
    value: bytes


async def read_fields(body: bytes, content_type: str) -> list[BodyField]:
    """As TorchServe reads them: fields of a form that are no files have no content type. Raises InvalidInput."""
    kind = _kind(content_type)
    if kind == _MULTIPART:
        return await _multipart(body, content_type)
    if kind == _URL_ENCODED:
        return url_encoded(body)
    return [BodyField("body", kind, body)]


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


async def _multipart(body: bytes, content_type: str) -> list[BodyField]:
    form = FormReader(content_type)
    fields = _FormFields()
    for start in range(0, len(body), _AT_ONCE):
        for event in form.feed(body[start : start + _AT_ONCE]):
            fields.take(event)
        await asyncio.sleep(0)
    if not form.complete:
        raise InvalidInput("body", "ends before the last boundary of its form")
    return fields.found


class _FormFields:
    """Collects the fields of one form."""

    def __init__(self) -> None:
        self.found: list[BodyField] = []
        self._name, self._kind, self._value = "", "", bytearray()

    def take(self, event: FormEvent) -> None:
        if isinstance(event, PartBegan):
            _check_count(len(self.found))
            self._name, self._value = event.name, bytearray()
            self._kind = "" if event.filename is None else _kind(event.content_type) or _OF_FILES
        elif isinstance(event, PartPiece):
            self._value += event.data
        else:
            self.found.append(BodyField(self._name, self._kind, bytes(self._value)))


def url_encoded(body: bytes) -> list[BodyField]:
    """The fields of a form, or of the query of a URL. Raises InvalidInput."""
    pairs = [pair for pair in body.split(b"&") if pair]
    _check_count(len(pairs) - 1)
    fields = []
    for pair in pairs:
        name, _, value = (unquote_to_bytes(part) for part in pair.replace(b"+", b" ").partition(b"="))
        fields.append(BodyField(name.decode("utf-8", "replace"), "", value))
    return fields


def _check_count(before: int) -> None:
    if before >= MAX_FIELDS:
        raise InvalidInput("body", f"its form has more than {MAX_FIELDS} fields")
