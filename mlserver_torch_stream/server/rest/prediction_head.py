"""The status and the headers of a reply on TorchServe's paths.

Knows nothing of bodies. A header that a handler has set is checked, since the HTTP server writes it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from uuid import uuid4

from starlette.types import Scope

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.server.rest.refusal import EncodedHeaders

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
_WITHOUT_BODY = (204, 304)


class UnsendableHead(RequestError):
    """The handler has set a status or a header that HTTP cannot carry."""

    status = 503


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own id; else a new one, after the prefix that the client has asked for."""
    own = OPENAI_CHAT.request_id({}, headers)
    if own:
        return own
    prefix = OPENAI_CHAT.request_id({}, {REQUEST_ID: headers.get(_PREFIX, "")})
    return f"{prefix}:{uuid4()}" if prefix else str(uuid4())


def first_headers(scope: Scope) -> dict[str, str]:
    """A request's headers by their names in lower case; of a header that comes several times, the first value."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def reply_headers(request_id: str, content_type: str = "", own: Mapping[str, str] | None = None) -> EncodedHeaders:
    """``own``: those of the handler; the headers of the connection are the server's. Raises UnsendableHead."""
    handlers = {name.lower(): value for name, value in (own or {}).items() if name.lower() not in _OF_THE_SERVER}
    if content_type:
        handlers["content-type"] = content_type
    for name, value in handlers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise UnsendableHead(f"the handler's header {name[:100]!r} cannot be sent")
    if not handlers:
        return [*_ENCODED, (_ENCODED_ID, request_id.encode("latin-1"))]
    headers = {**_NOT_CACHED, **handlers, REQUEST_ID: request_id}
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def check_status(status: int) -> None:
    """Raises UnsendableHead."""
    if not 200 <= status < 600:
        raise UnsendableHead(f"the handler's status {status} cannot be sent")


def body_of(status: int, value: bytes) -> bytes:
    return b"" if status in _WITHOUT_BODY else value
