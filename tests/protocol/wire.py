"""Encodes tensors and parameters as clients do, and decodes them with MLServer's own converters.

Knows nothing of this project's protocol.
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver.codecs.json import encode_to_json_bytes
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.types import InferenceRequest, InferenceResponse
from pydantic import PydanticDeprecatedSince20

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_PACKED = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f", "FP64": "d"}


@dataclass(frozen=True)
class T:
    """A tensor as tests write it; the shape defaults to [number of elements]."""

    name: str
    datatype: str
    data: Sequence[Any]
    shape: Sequence[int] | None = None

    @property
    def dims(self) -> list[int]:
        return list(self.shape) if self.shape is not None else [len(self.data)]


def text(*prompts: str, name: str = "text_input") -> T:
    return T(name, "BYTES", prompts)


Wire = Callable[..., InferenceRequest]


def over_rest(
    *tensors: T, parameters: Mapping[str, Any] | None = None, outputs: Sequence[str] = ()
) -> InferenceRequest:
    inputs = [{"name": t.name, "datatype": t.datatype, "shape": t.dims, "data": list(t.data)} for t in tensors]
    body: dict[str, Any] = {"inputs": inputs}
    if parameters is not None:
        body["parameters"] = parameters
    if outputs:
        body["outputs"] = [{"name": name} for name in outputs]
    return InferenceRequest.model_validate(json.loads(json.dumps(body)))


def over_grpc(
    *tensors: T, parameters: Mapping[str, Any] | None = None, outputs: Sequence[str] = (), raw: bool = False
) -> InferenceRequest:
    message = pb.ModelInferRequest(model_name="m")
    for t in tensors:
        tensor = message.inputs.add(name=t.name, datatype=t.datatype, shape=t.dims)
        elements = [e.encode() if isinstance(e, str) else e for e in t.data]
        if raw:
            message.raw_input_contents.append(_packed(t.datatype, elements))
        else:
            getattr(tensor.contents, _CONTENTS[t.datatype]).extend(elements)
    for key, value in (parameters or {}).items():
        _set_parameter(message.parameters[key], value)
    for name in outputs:
        message.outputs.add(name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticDeprecatedSince20)  # MLServer 1.7.1 calls ``construct``
        return ModelInferRequestConverter.to_types(pb.ModelInferRequest.FromString(message.SerializeToString()))


def over_raw_grpc(*tensors: T, **rest: Any) -> InferenceRequest:
    return over_grpc(*tensors, raw=True, **rest)


def rest_json(response: InferenceResponse) -> dict[str, Any]:
    """Returns the body that MLServer's REST server writes."""
    body: dict[str, Any] = json.loads(encode_to_json_bytes(response.model_dump()))
    return body


def grpc_message(response: InferenceResponse, *, raw: bool = False) -> pb.ModelInferResponse:
    """Returns the message that MLServer's gRPC server writes."""
    message = ModelInferResponseConverter.from_types(response, use_raw=raw)
    return pb.ModelInferResponse.FromString(message.SerializeToString())


def rest_outputs(response: InferenceResponse) -> dict[str, Any]:
    return {output["name"]: output["data"] for output in rest_json(response)["outputs"]}


def _packed(datatype: str, elements: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(element)) + element for element in elements)
    return struct.pack(f"<{len(elements)}{_PACKED[datatype]}", *elements)


def _set_parameter(parameter: Any, value: Any) -> None:
    """gRPC supports booleans, integers and strings; an object is sent as JSON, and a double arrives without a value."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, (dict, list)):
        parameter.string_param = json.dumps(value)
    elif isinstance(value, float):
        parameter.MergeFrom(pb.InferParameter())
