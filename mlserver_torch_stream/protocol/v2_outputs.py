"""Builds V2 output tensors and responses.

A response is the plain object that REST writes as JSON, and MLServer's model of it for gRPC is made from that. Knows
nothing of when a response is due.
"""

from __future__ import annotations

from typing import Any

from mlserver.types import InferenceResponse

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext

_DATATYPES = {**names.OUTPUT_DATATYPES, **names.CHAT_OUTPUT_DATATYPES}


def output(name: str, data: list[Any], shape: list[int] | None = None) -> JsonObject:
    """One tensor; the elements of BYTES are str."""
    return {"name": name, "shape": shape or [len(data)], "datatype": _DATATYPES[name], "data": data}


def head(context: ReplyContext, request_id: str) -> JsonObject:
    """The beginning of every response to one request."""
    version = {} if context.model_version is None else {"model_version": context.model_version}
    return {"model_name": context.model_name, **version, "id": request_id}


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
