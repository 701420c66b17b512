"""Reads a body that was posted to ``generate`` by its content type, as TorchServe's ``/predictions`` does.

Knows nothing of models or of how the body arrived.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.server.rest.body import parse_json
from mlserver_torch_stream.torchserve.handler_request import RequestPart

_JSON = "application/json"
_UNNAMED = ("", "application/x-www-form-urlencoded")  # curl sends the second one by default
_FORM = "multipart/form-data"
_OTHERWISE = (
    "name its content type (text/plain, image/png, application/octet-stream, …), or send it as the tensor `body` to "
    "infer or infer_stream"
)


class UnknownContentType(RequestError):
    """A body of a content type that handlers cannot get."""

    status = 415


def read_posted(raw: bytes, content_type: str) -> dict[str, Any] | RequestPart:
    """A JSON object, or the part ``body`` of the handler's request. Raises RequestError."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _FORM:
        raise UnknownContentType(
            f"content-type: {_FORM} is not implemented: send each field as a tensor of its name to infer or "
            "infer_stream, or the form to /predictions/{model}"
        )
    if kind != _JSON and kind not in _UNNAMED:
        return RequestPart("body", content_type, raw)
    try:
        parsed = parse_json(raw)
    except InvalidInput as error:
        if kind == _JSON:
            raise InvalidInput(error.field, f"{error.reason}: {_OTHERWISE}") from None
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    if kind in ("", _JSON):
        return RequestPart("body", content_type, raw)
    raise UnknownContentType(f"content-type: {kind} is read as a JSON object, which the body is not: {_OTHERWISE}")
