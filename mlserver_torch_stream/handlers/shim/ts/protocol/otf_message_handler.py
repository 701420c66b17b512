"""Writes TorchServe's binary format of a response, which the worker's ``wire`` reads.

Integers are big-endian 32-bit: status, message; per request its id, content type, status, reason, headers, value; -1.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.handlers.worker.values import Unserialisable, encode
from ts.protocol.message_reader import LOAD_MSG as LOAD_MSG
from ts.protocol.message_reader import PREDICT_MSG as PREDICT_MSG
from ts.protocol.message_reader import retrieve_msg as retrieve_msg
from ts.utils.util import deprecated

_ERROR = b"error"


def create_predict_response(
    ret: Any, req_id_map: dict[int, str], message: str, code: int, context: Any = None, ts_stream_next: bool = False
) -> bytearray | None:
    """None on other ranks than the first. A value that cannot be sent fails alone."""
    if os.getenv("LOCAL_RANK", "0") != "0":
        return None
    parts = [struct.pack("!i", code), _text(message)]
    for index, request_id in req_id_map.items():
        if isinstance(ret, dict) and index not in ret:
            continue
        if context is not None:
            _mark(context, index, ret, ts_stream_next)
        parts += [_text(request_id), *_about(index, code, context)]
        try:
            parts.append(_bytes(_ERROR if ret is None else encode(ret[index])))
        except Unserialisable as error:
            return create_predict_response(None, {index: request_id}, str(error), 503)
    return bytearray().join([*parts, struct.pack("!i", -1)])


def create_load_model_response(code: int, message: str) -> bytearray:
    return bytearray().join([struct.pack("!i", code), _text(message), struct.pack("!i", -1)])


@deprecated(version="1.0", replacement="ts.handler_utils.utils.send_intermediate_predict_response")
def send_intermediate_predict_response(
    ret: Any, req_id_map: dict[int, str], message: str, code: int, context: Any = None
) -> None:
    from ts.handler_utils import utils

    utils.send_intermediate_predict_response(ret, req_id_map, message, code, context)


def encode_response_headers(resp_hdr_map: Mapping[str, Any]) -> bytearray:
    pairs = [_text(str(text)) for pair in resp_hdr_map.items() for text in pair]
    return bytearray().join([struct.pack("!i", len(resp_hdr_map)), *pairs])


def _mark(context: Any, index: int, ret: Any, ts_stream_next: bool) -> None:
    """Sets the header that says whether more pieces follow."""
    if ts_stream_next:
        context.set_response_header(index, "ts_stream_next", "true")
    elif context.stopping_criteria:
        stops = context.stopping_criteria[index](ret[index])
        if stops is not None:
            context.set_response_header(index, "ts_stream_next", "false" if stops else "true")
    elif context.get_response_headers(index).get("ts_stream_next") == "true":
        context.set_response_header(index, "ts_stream_next", "false")


def _about(index: int, code: int, context: Any) -> list[bytes]:
    """Content type, status, reason and headers."""
    if context is None:
        return [_text(""), struct.pack("!i", code), _text(""), struct.pack("!i", 0)]
    status, phrase = context.get_response_status(index)
    return [
        _text(context.get_response_content_type(index) or ""),
        struct.pack("!i", status or 200),
        _text(phrase or ""),
        bytes(encode_response_headers(context.get_response_headers(index))),
    ]


def _text(text: str) -> bytes:
    return _bytes(text.encode())


def _bytes(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value
