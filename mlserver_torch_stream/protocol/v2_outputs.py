"""Builds V2 output tensors and responses.

A response is the plain object that REST writes as JSON, and MLServer's model of it for gRPC is made from that. Knows
nothing of when a response is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlserver.types import InferenceResponse

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.spelling import JsonObject

_DATATYPES = {**names.OUTPUT_DATATYPES, **names.CHAT_OUTPUT_DATATYPES}


def output(name: str, data: list[Any], shape: list[int] | None = None) -> JsonObject:
    """One tensor; the elements of BYTES are str."""
    return {"name": name, "shape": shape or [len(data)], "datatype": _DATATYPES[name], "data": data}


def response(
    model_name: str,
    model_version: str | None,
    request_id: str,
    parameters: Mapping[str, Any],
    outputs: list[JsonObject],
) -> JsonObject:
    """One response; gRPC drops parameters that are no string, integer or boolean."""
    return {**head(model_name, model_version, request_id), "parameters": parameters, "outputs": outputs}


def head(model_name: str, model_version: str | None, request_id: str) -> JsonObject:
    """The beginning of every response to one request."""
    version = {} if model_version is None else {"model_version": model_version}
    return {"model_name": model_name, **version, "id": request_id}


def as_response(body: JsonObject) -> InferenceResponse:
    """MLServer's model of a response: BYTES are bytes, as gRPC needs, and there is no ``error`` beside the outputs.

    Validation in Rust is the fastest way to construct the model.
    """
    message = {**body, "outputs": [_as_bytes(tensor) for tensor in body["outputs"]]}
    message.pop("error", None)
    return InferenceResponse.model_validate(message)


def _as_bytes(tensor: JsonObject) -> JsonObject:
    if tensor["datatype"] != "BYTES":
        return tensor
    return {**tensor, "data": [each.encode() if isinstance(each, str) else each for each in tensor["data"]]}
