"""Writes a handler's pieces as V2 responses with one tensor, ``output``, of the bytes that TorchServe would send.

Knows nothing of when a response is due. A body is the object that REST writes as JSON, except that the elements of
BYTES are bytes; ``as_rest`` makes them text.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext
from mlserver_torch_stream.protocol.v2_binary import BinaryOutputs
from mlserver_torch_stream.protocol.v2_outputs import head
from mlserver_torch_stream.torchserve.handler_request import HandlerRequest, ResponsePiece

OUTPUT = "output"
LENGTHS = "piece_lengths"
_NO_BINARY = BinaryOutputs()


class Reply:
    """Writes the responses to one request, numbered from 0."""

    def __init__(self, context: ReplyContext, request: HandlerRequest, speaks_v2: bool) -> None:
        self._context = context
        self._request = request
        self._speaks_v2 = speaks_v2
        self._headers = dict(context.headers)  # until the first response has taken them
        self._count = 0
        self.final_sent = False

    def piece(self, piece: ResponsePiece) -> JsonObject:
        return self._body(self._outputs([piece]), piece.last, piece)

    def whole(self, pieces: Sequence[ResponsePiece]) -> JsonObject:
        """One response of all pieces: their joined bytes and, if there are several, the length of each."""
        outputs = self._outputs(pieces)
        if len(pieces) > 1:
            lengths = [len(piece.value) for piece in pieces]
            outputs.append({"name": LENGTHS, "datatype": "INT64", "shape": [len(lengths)], "data": lengths})
        return self._body(outputs, True, pieces[-1])

    def failure(self, error: Exception) -> JsonObject:
        """The final response of a stream that has begun."""
        body = self._body([], True, None)
        body["error"] = body["parameters"]["error"] = str(error) or type(error).__name__
        return body

    def _outputs(self, pieces: Sequence[ResponsePiece]) -> list[JsonObject]:
        joined = b"".join(piece.value for piece in pieces)
        if self._speaks_v2 and len(pieces) == 1 and (outputs := _v2_outputs(joined)) is not None:
            return outputs
        return [{"name": OUTPUT, "datatype": "BYTES", "shape": [1], "data": [joined]}]

    def _body(self, outputs: list[JsonObject], final: bool, piece: ResponsePiece | None) -> JsonObject:
        request = self._request
        parameters: dict[str, Any] = {
            "request_id": request.request_id,
            "chunk_index": self._count,
            "triton_final_response": final,
        }
        if self._context.request_index is not None:
            parameters["request_index"] = self._context.request_index
        if request.sequence_id is not None:
            parameters["sequence_id"] = request.sequence_id
        if piece is not None:
            parameters |= {f"header.{name}": text for name, text in piece.headers.items()}
            if piece.content_type:
                parameters["content_type"] = piece.content_type
            if piece.status != 200:
                parameters["status"] = piece.status
        if self._headers:
            parameters["headers"], self._headers = self._headers, {}
        self._count += 1
        self.final_sent |= final
        return {**head(self._context, request.request_id), "parameters": parameters, "outputs": outputs}


def as_rest(body: JsonObject, binary: BinaryOutputs = _NO_BINARY) -> JsonObject:
    """Writes the elements of BYTES as text, or as base64 if they are no text; the content type then says base64.

    ``binary``: the outputs, by name, that stay bytes.
    """
    outputs = [tensor if binary(tensor["name"]) else _tensor_as_rest(tensor) for tensor in body["outputs"]]
    return {**body, "outputs": outputs}


def _tensor_as_rest(tensor: JsonObject) -> JsonObject:
    if tensor["datatype"] != "BYTES":
        return tensor
    try:
        return {**tensor, "data": [_text(each) for each in tensor["data"]]}
    except UnicodeDecodeError:
        encoded = [base64.b64encode(_bytes(each)).decode() for each in tensor["data"]]
        return {**tensor, "parameters": {"content_type": "base64"}, "data": encoded}


def _v2_outputs(value: bytes) -> list[JsonObject] | None:
    """The tensors in a response of the envelope ``kservev2``; None if the value is no such response."""
    try:
        outputs = orjson.loads(value)["outputs"]
        return [
            {
                "name": str(each["name"]),
                "datatype": str(each["datatype"]),
                "shape": [int(size) for size in each["shape"]],
                "data": [_bytes(item) if each["datatype"] == "BYTES" else item for item in each["data"]],
            }
            for each in outputs
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _text(element: Any) -> str:
    return element.decode() if isinstance(element, bytes) else str(element)


def _bytes(element: Any) -> bytes:
    return element if isinstance(element, bytes) else str(element).encode()
