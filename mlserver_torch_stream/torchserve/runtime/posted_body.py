"""A body that was posted to ``generate`` as a handler gets it: by its content type, as TorchServe's ``/predictions``.

Knows nothing of models or of how the body arrived.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.server.rest.body import parse_json
from mlserver_torch_stream.torchserve.handler_request import RequestPart

_JSON = "application/json"
_UNNAMED = ("", "application/x-www-form-urlencoded")  # what curl says that is told nothing
_FORM = "multipart/form-data"
_OTHERWISE = (
    "name its content type (text/plain, image/png, application/octet-stream, …), or send it as the tensor `body` to "
    "infer or infer_stream"
)


class UnknownContentType(RequestError):
    """A body that no handler is given in this form."""

    status = 415


def read_posted(raw: bytes, content_type: str) -> dict[str, Any] | RequestPart:
    """A JSON object, or what else the handler gets as ``body``. Raises RequestError."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _JSON:
        try:
            parsed = parse_json(raw)
        except InvalidInput as error:
            raise InvalidInput(error.field, f"{error.reason}: {_OTHERWISE}") from None
        return parsed if isinstance(parsed, dict) else RequestPart("body", content_type, raw)
    if kind == _FORM:
        raise UnknownContentType(
            f"content-type: {_FORM} is not implemented: send each field as a tensor of its name to infer or "
            "infer_stream"
        )
    if kind not in _UNNAMED:
        return RequestPart("body", content_type, raw)
    parsed = _object_of(raw)
    if parsed is not None:
        return parsed
    if kind:
        raise UnknownContentType(f"content-type: {kind} is read as a JSON object, which the body is not: {_OTHERWISE}")
    return RequestPart("body", "", raw)


def _object_of(raw: bytes) -> dict[str, Any] | None:
    try:
        parsed = parse_json(raw)
    except InvalidInput:
        return None
    return parsed if isinstance(parsed, dict) else None
