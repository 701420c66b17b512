"""Decodes the values of requests for a handler and encodes its results, both as TorchServe does.

This module never imports torch; it recognises tensors if the handler has imported torch.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)
UNSUPPORTED = "Unsupported model output data type."


class Unserialisable(Exception):
    """Raised for a value that cannot be sent to a client; the message is the reason."""


def decode(value: bytes, content_type: str) -> Any:
    """Decodes JSON to an object and text to str; other content types, and values that cannot be decoded, to a
    bytearray.
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "application/json" and _decodes():
            return json.loads(value)
        if kind.startswith("text") and _decodes():
            return value.decode()
    except ValueError as error:
        logger.warning("A body does not match its content type %s: %s", kind, error)
    return bytearray(value)


def _decodes() -> bool:
    return os.environ.get("TS_DECODE_INPUT_REQUEST", "true") == "true"


def encode(value: Any) -> bytes:
    """Encodes a handler's result: bytes unchanged, text as UTF-8, a tensor by ``torch.save``, other values as JSON.

    Raises Unserialisable.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()
    try:
        return json.dumps(value, indent=2).encode()
    except (TypeError, ValueError, RecursionError):
        raise Unserialisable(f"{UNSUPPORTED} The handler returned a {type(value).__name__}") from None
