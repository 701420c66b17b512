"""TorchServe's binary spelling of a response, written. The worker's ``wire`` reads it.

Integers are big-endian 32-bit: status, message; per request its id, content type, status, reason, headers, value; -1.
"""

from __future__ import annotations

import os
import struct
import warnings
from typing import Any

from mlserver_torch_stream.torchserve.worker.values import Unserialisable, encode

_ERROR = b"error"


def create_predict_response(
    ret: Any, req_id_map: dict[int, str], message: str, code: int, context: Any = None, ts_stream_next: bool = False
) -> bytes | None:
    """None on ranks that do not speak. A value that cannot be sent fails, alone."""
    if os.getenv("LOCAL_RANK", "0") != "0":
        return None
    parts = [struct.pack("!i", code), _text(message)]
    for index, request_id in req_id_map.items():
        if isinstance(ret, dict) and index not in ret:
            continue
        parts += [_text(request_id), *_about(index, code, context, ts_stream_next)]
        try:
            parts.append(_bytes(_ERROR if ret is None else encode(ret[index])))
        except Unserialisable as error:
            return create_predict_response(None, {index: request_id}, str(error), 503)
    return b"".join([*parts, struct.pack("!i", -1)])


def send_intermediate_predict_response(
    ret: Any, req_id_map: dict[int, str], message: str, code: int, context: Any = None
) -> None:
    from ts.handler_utils import utils

    moved = "send_intermediate_predict_response has moved to ts.handler_utils.utils"
    warnings.warn(moved, PendingDeprecationWarning, stacklevel=2)
    utils.send_intermediate_predict_response(ret, req_id_map, message, code, context)


def _about(index: int, code: int, context: Any, ts_stream_next: bool) -> list[bytes]:
    """Content type, status, reason and headers."""
    if context is None:
        return [_text(""), struct.pack("!i", code), _text(""), struct.pack("!i", 0)]
    if ts_stream_next:
        context.set_response_header(index, "ts_stream_next", "true")
    elif context.get_response_headers(index).get("ts_stream_next") == "true":
        context.set_response_header(index, "ts_stream_next", "false")
    status, phrase = context.get_response_status(index)
    headers = context.get_response_headers(index)
    pairs = [_text(str(text)) for pair in headers.items() for text in pair]
    return [
        _text(context.get_response_content_type(index) or ""),
        struct.pack("!i", status or 200),
        _text(phrase or ""),
        struct.pack("!i", len(headers)),
        *pairs,
    ]


def _text(text: str) -> bytes:
    return _bytes(text.encode())


def _bytes(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value
