"""Reads and writes TorchServe's REST messages: fields of forms and queries, headers, statuses and errors.

A header that a handler has set is checked, because the HTTP server writes it unchanged. The types of errors are the
names of TorchServe's exceptions.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes
from uuid import uuid4

import orjson
from mlserver.registry import MultiModelRegistry
from starlette.types import Scope

from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull, RequestError, Unauthorized
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.server.host import find_model
from mlserver_torch_stream.server.rest.connection import BodyTooLarge, EncodedHeaders, UnknownCoding
from mlserver_torch_stream.server.rest.forms import FormEvent, FormReader, PartBegan, PartPiece

MAX_FIELDS = 1000
_AT_ONCE = 64 * 1024  # bytes of a form that are parsed before other requests get a turn
_URL_ENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
_OF_FILES = "application/octet-stream"  # the content type of a file that does not name one


@dataclass(frozen=True, slots=True)
class BodyField:
    """One field of a body. ``content_type`` has no parameters, and is empty if the client named none."""

    name: str
    content_type: str
    value: bytes


async def read_fields(body: bytes, content_type: str) -> list[BodyField]:
    """Returns the fields of a body as TorchServe reads them: only files in a form have a content type.

    Raises InvalidInput.
    """
    return await _multipart(body, content_type) if is_multipart(content_type) else simple_fields(body, content_type)


def is_multipart(content_type: str) -> bool:
    return _kind(content_type) == _MULTIPART


def simple_fields(body: bytes, content_type: str) -> list[BodyField]:
    """Returns the fields of a body that is not a multipart form. Raises InvalidInput."""
    kind = _kind(content_type)
    return url_encoded(body) if kind == _URL_ENCODED else [BodyField("body", kind, body)]


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
    """Returns the fields of a URL-encoded form or of a URL's query. Raises InvalidInput."""
    pairs = [pair for pair in body.split(b"&") if pair]
    _check_count(len(pairs) - 1)
    fields = []
    for pair in pairs:
        name, _, value = (unquote_to_bytes(part) for part in pair.replace(b"+", b" ").partition(b"="))
        fields.append(BodyField(name.decode("utf-8", "replace"), "", value))
    return fields


def _check_count(before: int) -> None:
    if before >= MAX_FIELDS:
        raise InvalidInput("body", f"the form has more than {MAX_FIELDS} fields")


REQUEST_ID = "x-request-id"
_PREFIX = "x-request-id-prefix"
# Headers of TorchServe's replies, unless the handler has set them.
_NOT_CACHED = {
    "pragma": "no-cache",
    "cache-control": "no-cache; no-store, must-revalidate, private",
    "expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
_ENCODED = tuple((name.encode(), value.encode()) for name, value in _NOT_CACHED.items())
_ENCODED_ID = REQUEST_ID.encode()
_OF_THE_SERVER = frozenset({REQUEST_ID, "content-length", "transfer-encoding", "connection", "date", "server"})
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
WITHOUT_BODY = (204, 304)  # statuses whose responses have no body


class UnsendableHead(RequestError):
    """The handler has set a status or a header that cannot be sent over HTTP."""

    status = 503


def request_id_of(headers: Mapping[str, str]) -> str:
    """Returns the id that the client gave the request; else a new id, which begins with the prefix that the client asks
    for.
    """
    own = OPENAI_CHAT.request_id({}, headers)
    if own:
        return own
    asked = headers.get(_PREFIX)
    prefix = asked and OPENAI_CHAT.request_id({}, {REQUEST_ID: asked})
    return f"{prefix}:{uuid4()}" if prefix else str(uuid4())


def first_headers(scope: Scope) -> dict[str, str]:
    """Returns a request's headers by lower-case name; for a repeated header, its first value."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def handler_headers(headers: Mapping[str, str], rest: str = "", explain: bool = False) -> dict[str, str]:
    """Returns the headers that the handler gets. ``rest`` is what follows the model in the path."""
    return {**headers, "url_path": rest, "explain": str(explain)}


def reply_headers(request_id: str, content_type: str = "", own: Mapping[str, str] | None = None) -> EncodedHeaders:
    """Returns the headers of a reply. ``own`` are the handler's headers. Headers that concern the connection are left
    out, because the server sets them.

    Raises UnsendableHead.
    """
    handlers = {name.lower(): value for name, value in (own or {}).items() if name.lower() not in _OF_THE_SERVER}
    if content_type:
        handlers["content-type"] = content_type
    for name, value in handlers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            reason = "its name is empty, or its name or value has characters that HTTP does not allow"
            raise UnsendableHead(f"the handler's header {name[:100]!r} cannot be sent: {reason}")
    if not handlers:
        return [*_ENCODED, (_ENCODED_ID, request_id.encode("latin-1"))]
    headers = {**_NOT_CACHED, **handlers, REQUEST_ID: request_id}
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def check_status(status: int) -> None:
    """Raises UnsendableHead if HTTP does not allow the status."""
    if not 200 <= status < 600:
        raise UnsendableHead(f"the handler's status {status} cannot be sent: it must be from 200 to 599")


def body_of(status: int, value: bytes) -> bytes:
    """Returns the body of a response, which is empty for statuses such as 204."""
    return b"" if status in WITHOUT_BODY else value


_API = "v1"


@dataclass(frozen=True, slots=True)
class PredictionPath:
    """The parts of a path. TorchServe passes ``rest`` to the handler as the header ``url_path``."""

    name: str
    version: str | None
    rest: str

    @classmethod
    def of(cls, parameters: Mapping[str, str], registry: MultiModelRegistry) -> PredictionPath:
        """Splits a path as TorchServe does, except that ``v1`` followed by more is a version only if the model has that
        version.
        """
        name, version = parameters["model_name"], parameters.get("model_version")
        rest = parameters.get("url_path", "").rstrip("/")
        if version == _API and rest and find_model(registry, name, _API) is None:
            return cls(name, None, f"{_API}/{rest}")
        return cls(name, version, rest)


_SPELLED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE  # TorchServe's spelling of JSON


class NoSuchModel(RequestError):
    """No model has this name. The message is TorchServe's."""

    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"Model not found: {name}")


class NoSuchVersion(RequestError):
    """The model does not have this version. The message is TorchServe's."""

    status = 404

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"Model version: {version} does not exist for model: {name}")


class NoSuchPath(RequestError):
    """The endpoint does not exist. The message is TorchServe's, with a list of the endpoints."""

    status = 404

    def __init__(self, rest: str, paths: Sequence[str]) -> None:
        super().__init__(f"Unknown API endpoint: {rest}; the endpoints are {', '.join(paths)}")


class WrongMethod(RequestError):
    """A prediction was requested with a method other than POST and PUT. The message is TorchServe's."""

    status = 405

    def __init__(self) -> None:
        super().__init__("Requested method is not allowed, use POST or PUT.")


class MissingParameter(InvalidInput):
    """A request of the gRPC service lacks a parameter. The message is TorchServe's."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "is required")
        self.message = f"Parameter {name} is required."


# The type of an error is in the first row whose class it has; with None it keeps its own status.
_TYPES: tuple[tuple[type[RequestError], str, int | None], ...] = (
    (NoSuchModel, "ModelNotFoundException", None),
    (NoSuchVersion, "ModelVersionNotFoundException", None),
    (NoSuchPath, "ResourceNotFoundException", None),
    (WrongMethod, "MethodNotAllowedException", None),
    (Unauthorized, "InvalidKeyException", None),
    (InvalidInput, "BadRequestException", 400),
    (UnknownCoding, "BadRequestException", None),
    (BodyTooLarge, "TooLongFrameException", None),
    (QueueFull, "ServiceUnavailableException", 503),
    (NotServing, "ServiceUnavailableException", None),
    (RequestError, "InternalServerException", None),
)


def status_and_body(error: RequestError) -> tuple[int, bytes]:
    """Returns the status and the JSON body with which TorchServe reports such an error."""
    kind, status = next((kind, status) for each, kind, status in _TYPES if isinstance(error, each))
    code = error.status if status is None else status
    return code, as_json({"code": code, "type": kind, "message": error.message})


def as_json(body: dict[str, object]) -> bytes:
    """Returns JSON as TorchServe writes it."""
    return orjson.dumps(body, option=_SPELLED)
