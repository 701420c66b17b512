"""Writes the responses of streams as gRPC messages, without MLServer's own model of a response.

Making and converting that model takes several times as long. Knows nothing of streams.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.converters import ModelInferResponseConverter

from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.v2_binary import packed

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class StreamedResponse:
    """One response of a stream, which stands for MLServer's model of a response.

    MLServer sets ``id`` and the headers of ``parameters``, from which it makes the metadata of the call.
    """

    def __init__(self, body: JsonObject) -> None:
        self.id: str = body["id"]
        self.model_name: str = body["model_name"]
        self.parameters = SimpleNamespace(headers=body["parameters"].get("headers"))
        self.body = body


def install() -> None:
    """Makes MLServer's servicer convert streamed responses too. Called once."""
    original = ModelInferResponseConverter.from_types

    @functools.wraps(original)
    def from_types(type_object: Any, use_raw: bool = False) -> pb.ModelInferResponse:
        if not isinstance(type_object, StreamedResponse):
            return original(type_object, use_raw=use_raw)
        message = response_message(type_object.body, raw=use_raw)
        message.id = type_object.id
        return message

    ModelInferResponseConverter.from_types = from_types


def response_message(body: JsonObject, *, raw: bool) -> pb.ModelInferResponse:
    """The message of a response; ``raw``: with raw contents.

    A message has no ``error`` beside its outputs, and its parameters are strings, integers and booleans.
    """
    version = body.get("model_version") or ""
    message = pb.ModelInferResponse(model_name=body["model_name"], model_version=version, id=body["id"])
    _set_parameters(message.parameters, body["parameters"])
    for tensor in body["outputs"]:
        name, datatype, data = tensor["name"], tensor["datatype"], tensor["data"]
        output = message.outputs.add(name=name, datatype=datatype, shape=tensor["shape"])
        _set_parameters(output.parameters, tensor.get("parameters") or {})
        output.contents.SetInParent()
        if raw:
            message.raw_output_contents.append(packed(tensor))
        elif datatype == "BYTES":
            output.contents.bytes_contents.extend(each.encode() if isinstance(each, str) else each for each in data)
        else:
            getattr(output.contents, _CONTENTS[datatype]).extend(data)
    return message


def _set_parameters(target: Any, parameters: JsonObject) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        elif isinstance(value, int):
            target[name].int64_param = value
