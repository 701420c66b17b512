"""Decodes the values of requests for a handler and encodes its results, both as TorchServe does.

torch is used only where the handler has imported it.
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
    """A value that cannot be sent to a client; the message is the reason."""


def decode(value: bytes, content_type: str) -> Any:
    """JSON as an object, text as str, other types as a bytearray; so is a value that does not fit its content type."""
    kind = content_type.partition(";")[0].strip().lower()
    wanted = os.environ.get("TS_DECODE_INPUT_REQUEST", "true") == "true"
    try:
        if wanted and kind == "application/json":
            return json.loads(value)
        if wanted and kind.startswith("text"):
            return value.decode()
    except ValueError as error:
        logger.warning("A body is not of its content type %s: %s", kind, error)
    return bytearray(value)


def encode(value: Any) -> bytes:
    """Raises Unserialisable."""
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
