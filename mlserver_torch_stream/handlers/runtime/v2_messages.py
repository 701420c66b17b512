"""Turns a V2 request into a handler's request, and a handler's pieces into V2 responses.

A body here is the object that REST writes as JSON, except that the elements of BYTES tensors are bytes; ``as_rest``
turns them into text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import orjson

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest, RequestPart, ResponsePiece
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext, head
from mlserver_torch_stream.protocol.v2_names import SEQUENCE_PARAMETERS, sequence_header
from mlserver_torch_stream.protocol.v2_tensors import BinaryOutputs, parameters_of, raw_element, read_elements

JSON = "application/json"
_TEXT = "text/plain"
_CONTENT_TYPES = {"str": _TEXT, "base64": "", "np": "", "raw": ""}  # MLServer's content type -> the MIME type
# Parameters for the server, which do not become headers of the handler's request.
_NO_HEADERS = {"timeout", "headers", "content_type", "binary_data_output", "stream", *SEQUENCE_PARAMETERS}
_MICROSECONDS = 1_000_000


def read_request(payload: Any, request_id: str, config: HandlerConfig, envelope: str) -> HandlerRequest:
    """Turns a V2 request into the handler's request, with one part for each tensor. Raises InvalidInput."""
    parameters = parameters_of(payload.parameters)
    if not payload.inputs:
        raise InvalidInput("inputs", "there must be at least one tensor: `body`, or the names of the handler's fields")
    parts = [_whole(payload)] if _is_for_envelope(payload, envelope) else _parts(payload)
    return read_parts(parts, _transport_headers(payload), request_id, config, parameters)


def read_body(
    body: Mapping[str, Any] | RequestPart, headers: Mapping[str, str], request_id: str, config: HandlerConfig
) -> HandlerRequest:
    """Makes a request from a body in the handler's own format; a JSON object keeps its key ``parameters``."""
    part = body if isinstance(body, RequestPart) else RequestPart("body", JSON, orjson.dumps(body))
    return read_parts([part], headers, request_id, config)


def read_parts(
    parts: list[RequestPart],
    headers: Mapping[str, str],
    request_id: str,
    config: HandlerConfig,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> HandlerRequest:
    """Makes a request from its parts. V2's ``parameters`` become options of the server or headers, added to
    ``headers``.

    Raises InvalidInput.
    """
    headers = {str(name).lower(): str(text) for name, text in headers.items()}
    sequence_id = _sequence(parameters, headers, config)
    ends = headers.get(sequence_header("sequence_end"), "").lower() == "true"
    headers.update((name, _header_text(value)) for name, value in parameters.items() if name not in _NO_HEADERS)
    return HandlerRequest(
        request_id,
        parts,
        headers,
        sequence_id,
        bool(parameters.get("sequence_end", ends)),
        _timeout(parameters.get("timeout"), config),
    )


def _is_for_envelope(payload: Any, envelope: str) -> bool:
    """True if the whole request goes to one of KServe's envelopes.

    Under ``kserve`` the request may also have one tensor ``body``, which holds the JSON of KServe's V1 protocol.
    """
    return envelope == "kservev2" or (envelope == "kserve" and {each.name for each in payload.inputs} != {"body"})


def _sequence(parameters: Mapping[str, Any], headers: dict[str, str], config: HandlerConfig) -> str | None:
    """Returns the id of the request's sequence, and adds TorchServe's headers for sequences to ``headers``."""
    for name in ("sequence_start", "sequence_end"):
        if not isinstance(parameters.get(name, False), bool):
            raise InvalidInput(name, "must be true or false")
        if parameters.get(name):
            headers[sequence_header(name)] = "true"
    given = parameters.get("sequence_id")
    if isinstance(given, bool) or not isinstance(given, (str, int, type(None))):
        raise InvalidInput("sequence_id", "must be a string or an integer")
    sequence_id = str(given) if given else headers.get(sequence_header("sequence_id")) or None
    if sequence_id is None and config.sequenceBatching:
        if parameters.get("sequence_end"):
            raise InvalidInput("sequence_id", "is needed to end a sequence")
        sequence_id = f"ts-seq-{uuid4()}"  # as in TorchServe, a new sequence gets an id
        headers[sequence_header("sequence_start")] = "true"
    if sequence_id is not None:
        headers[sequence_header("sequence_id")] = sequence_id
    return sequence_id


def _timeout(given: Any, config: HandlerConfig) -> float | None:
    bound = config.clientTimeoutInMills / 1000 or None
    if given is None:
        return bound
    try:
        seconds = int(given) / _MICROSECONDS
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput("timeout", "must be a number of microseconds") from None
    if seconds <= 0:
        raise InvalidInput("timeout", "must be above 0")
    return min(seconds, bound) if bound else seconds


def _parts(payload: Any) -> list[RequestPart]:
    fallback = payload.parameters.content_type if payload.parameters is not None else None
    parts: dict[str, RequestPart] = {}
    for tensor in payload.inputs:
        if tensor.name in parts:
            raise InvalidInput(tensor.name, "given twice")
        content_type = (tensor.parameters.content_type if tensor.parameters is not None else None) or fallback or ""
        parts[tensor.name] = _part(tensor, content_type)
    return list(parts.values())


def _part(tensor: Any, content_type: str) -> RequestPart:
    name = tensor.name
    datatype, elements = read_elements(tensor)
    if datatype != "BYTES":
        return RequestPart(name, JSON, _json(name, _shaped(elements, tensor.shape)))
    values = [raw_element(name, each, content_type == "base64") for each in elements]
    if len(values) == 1:
        return RequestPart(name, _CONTENT_TYPES.get(content_type, content_type), values[0])
    return RequestPart(name, JSON, _json(name, [value.decode("utf-8", "replace") for value in values]))


def _whole(payload: Any) -> RequestPart:
    """Returns the whole request as JSON, for an envelope that reads V2 itself."""
    inputs = []
    for tensor in payload.inputs:
        datatype, elements = read_elements(tensor)
        data = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in elements]
        inputs.append({"name": tensor.name, "shape": list(tensor.shape), "datatype": datatype, "data": data})
    return RequestPart("body", JSON, _json("inputs", {"id": payload.id, "inputs": inputs}))


def _shaped(elements: list[Any], shape: list[int]) -> list[Any]:
    """Nests a tensor's flat elements into lists of the tensor's shape."""
    for size in reversed(shape[1:]):
        elements = [elements[start : start + size] for start in range(0, len(elements), size)] if size else []
    return elements


def _json(name: str, value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput(name, "the elements do not match the datatype") from None


def _transport_headers(payload: Any) -> Mapping[str, str]:
    return (payload.parameters.headers or {}) if payload.parameters is not None else {}


def _header_text(value: Any) -> str:
    """Formats a parameter's value as the text of a header."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else orjson.dumps(value).decode()


OUTPUT = "output"
LENGTHS = "piece_lengths"
_NO_BINARY = BinaryOutputs()


class PieceEncoder:
    """Writes the responses to one request, and numbers them from 0."""

    def __init__(self, context: ReplyContext, request: HandlerRequest, speaks_v2: bool) -> None:
        self._context = context
        self._request = request
        self._speaks_v2 = speaks_v2
        self._headers = dict(context.headers)  # empty after the first response, which has them
        self._count = 0
        self.final_sent = False

    def piece(self, piece: ResponsePiece) -> JsonObject:
        """Returns the V2 response that carries one piece."""
        return self._body(self._outputs([piece]), piece.last, piece)

    def whole(self, pieces: Sequence[ResponsePiece]) -> JsonObject:
        """Returns one response with the joined bytes of all pieces and, if there are several, their lengths."""
        outputs = self._outputs(pieces)
        if len(pieces) > 1:
            lengths = [len(piece.value) for piece in pieces]
            outputs.append({"name": LENGTHS, "datatype": "INT64", "shape": [len(lengths)], "data": lengths})
        return self._body(outputs, True, pieces[-1])

    def failure(self, error: Exception) -> JsonObject:
        """Returns the final response of a stream that failed after its start."""
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
    """Writes the elements of BYTES tensors as text, or as base64 with that content type if they are not UTF-8.

    The outputs that ``binary`` names stay bytes.
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
    """Returns the tensors in a response of the envelope ``kservev2``; None if the value is not such a response."""
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
