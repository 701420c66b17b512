"""Turns a V2 request into a handler's request: each input tensor becomes a field, each request parameter a header.

Knows MLServer's class of a request by its attributes, and nothing of how a request is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import orjson

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.sequence_headers import SEQUENCE_PARAMETERS, sequence_header
from mlserver_torch_stream.protocol.v2_tensors import parameters_of, raw_element, read_elements
from mlserver_torch_stream.torchserve.config import HandlerConfig
from mlserver_torch_stream.torchserve.handler_request import HandlerRequest, RequestPart

JSON = "application/json"
_TEXT = "text/plain"
_CONTENT_TYPES = {"str": _TEXT, "base64": "", "np": "", "raw": ""}  # by MLServer's names
# Parameters for the server: the handler gets no header of them.
_NO_HEADERS = {"timeout", "headers", "content_type", "binary_data_output", "stream"}
_MICROSECONDS = 1_000_000


def read_request(payload: Any, request_id: str, config: HandlerConfig, envelope: str) -> HandlerRequest:
    """Raises InvalidInput."""
    parameters = parameters_of(payload.parameters)
    if not payload.inputs:
        raise InvalidInput("inputs", "there must be at least one tensor: `body`, or what the handler calls its fields")
    parts = [_whole(payload)] if _is_for_envelope(payload, envelope) else _parts(payload)
    return read_parts(parts, _transport_headers(payload), request_id, config, parameters)


def read_body(
    body: Mapping[str, Any] | RequestPart, headers: Mapping[str, str], request_id: str, config: HandlerConfig
) -> HandlerRequest:
    """Makes a request of the handler's own body. ``parameters`` of a JSON object stay in the object."""
    part = body if isinstance(body, RequestPart) else RequestPart("body", JSON, orjson.dumps(body))
    return read_parts([part], headers, request_id, config)


def read_parts(
    parts: list[RequestPart],
    headers: Mapping[str, str],
    request_id: str,
    config: HandlerConfig,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> HandlerRequest:
    """Makes a request of the handler's own fields. ``headers`` and V2's ``parameters`` say everything else."""
    headers = {str(name).lower(): str(text) for name, text in headers.items()}
    sequence_id = _sequence(parameters, headers, config)
    ends = headers.get(sequence_header("sequence_end"), "").lower() == "true"
    unnamed = _NO_HEADERS | set(SEQUENCE_PARAMETERS)
    own = {name: _header_text(value) for name, value in parameters.items() if name not in unnamed}
    return HandlerRequest(
        request_id,
        parts,
        {**headers, **own},
        sequence_id,
        bool(parameters.get("sequence_end", ends)),
        _timeout(parameters.get("timeout"), config),
    )


def _is_for_envelope(payload: Any, envelope: str) -> bool:
    """True if KServe's envelope reads the whole request; under ``kserve`` the tensor ``body`` may hold V1's JSON."""
    return envelope == "kservev2" or (envelope == "kserve" and {each.name for each in payload.inputs} != {"body"})


def _sequence(parameters: Mapping[str, Any], headers: dict[str, str], config: HandlerConfig) -> str | None:
    """The id of the request's sequence. Writes TorchServe's headers of the sequence into ``headers``."""
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
        sequence_id = f"ts-seq-{uuid4()}"  # a sequence begins, as in TorchServe
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
    """The whole request in JSON, for an envelope that reads V2 itself."""
    inputs = []
    for tensor in payload.inputs:
        datatype, elements = read_elements(tensor)
        data = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in elements]
        inputs.append({"name": tensor.name, "shape": list(tensor.shape), "datatype": datatype, "data": data})
    return RequestPart("body", JSON, _json("inputs", {"id": payload.id, "inputs": inputs}))


def _shaped(elements: list[Any], shape: list[int]) -> list[Any]:
    """Nested lists of the tensor's shape."""
    for size in reversed(shape[1:]):
        elements = [elements[start : start + size] for start in range(0, len(elements), size)] if size else []
    return elements


def _json(name: str, value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput(name, "its elements are not what its datatype says") from None


def _transport_headers(payload: Any) -> Mapping[str, str]:
    return (payload.parameters.headers or {}) if payload.parameters is not None else {}


def _header_text(value: Any) -> str:
    """The value as the text of a header."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else orjson.dumps(value).decode()
