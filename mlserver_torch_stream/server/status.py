"""Turns our errors into MLServer's errors, and CloudEvents attributes into headers and metadata.

The id that a client gives a request may have any characters and any length, but a header may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import grpc
from mlserver.errors import MLServerError

from mlserver_torch_stream.errors import NotServing, RequestError
from mlserver_torch_stream.server.host import add_grpc_codes

# Bytes of an error's text in gRPC metadata. Clients reject metadata of more than 8 KiB, and lose the error with them.
_MAX_DETAILS = 4096


class StreamStatus(int):
    """A REST status that maps to another gRPC code on a stream than on a unary call.

    Seldon Core 2 interprets UNAVAILABLE on a unary call as "model not loaded" and reloads the model. So 503 becomes
    RESOURCE_EXHAUSTED on unary calls, and UNAVAILABLE on streams. MLServer has only one table for both, so this class
    is a separate key in the table.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamStatus) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("stream", int(self)))


class ModelNotLoaded(MLServerError):  # type: ignore[misc]
    """A model of this package failed to load, and the log says why. MLServer returns this error to the client."""

    def __init__(self, why: str) -> None:
        super().__init__(why, 500)


_CODES = {
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.RESOURCE_EXHAUSTED,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StreamStatus(503): grpc.StatusCode.UNAVAILABLE,
}


def extend_grpc_codes() -> None:
    """Adds gRPC codes for statuses that MLServer itself reports as UNKNOWN or FAILED_PRECONDITION. Idempotent."""
    add_grpc_codes(_CODES)


class RefusedCall(MLServerError):  # type: ignore[misc]
    """The error that a model of this package raises to MLServer when it refuses a request. The request has already been
    logged.
    """


def as_server_error(error: RequestError, *, streaming: bool) -> RefusedCall:
    """Returns the error that makes MLServer answer with the status of ``error``."""
    status = StreamStatus(error.status) if streaming and isinstance(error, NotServing) else error.status
    return RefusedCall(error.message, status)


def details_that_fit(text: str) -> str:
    """Returns as much of the text as fits into metadata, where each byte that is not printable ASCII takes three."""
    left = _MAX_DETAILS
    for place, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        left -= 1 if plain else 3 * len(character.encode("utf-8", "replace"))
        if left < 0:
            return f"{text[:place]}…"
    return text


# Characters of one value. gRPC clients reject a reply with more than 8 KiB of metadata, which contains an id twice.
_MAX_CHARS = 1024


def as_headers(attributes: Mapping[str, str]) -> dict[str, str]:
    """Returns the attributes as headers, with names in lower case.

    As in CloudEvents, values are percent-encoded if needed. Values that are too long are left out.
    """
    encoded = {name.lower(): _encoded(value) for name, value in attributes.items()}
    return {name: value for name, value in encoded.items() if len(value) <= _MAX_CHARS}


def _encoded(value: str) -> str:
    return value if value.isascii() and value.isprintable() else quote(value)
