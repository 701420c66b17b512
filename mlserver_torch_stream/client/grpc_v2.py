"""The V2 protocol over gRPC as the client speaks it: a call as a message, messages as deltas, codes as errors.

Knows nothing of channels.
"""

from __future__ import annotations

import json
from typing import Any

import grpc

from mlserver_torch_stream.client.client_errors import (
    UNREADABLE,
    ClientError,
    ConnectionFailed,
    RequestRefused,
    StreamBroken,
    unreadable,
)
from mlserver_torch_stream.client.deltas import Delta
from mlserver_torch_stream.client.generation_call import GenerationCall
from mlserver_torch_stream.client.grpc_messages import (
    ModelInferRequest,
    ModelInferResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
)
from mlserver_torch_stream.client.v2_json import deltas_of, input_tensors, plain_parameters
from mlserver_torch_stream.v2_reader import read_reply

_SERVICE = "/inference.GRPCInferenceService"
_INT64 = range(-(2**63), 2**63)
_STATUS = {
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INVALID_ARGUMENT: 422,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# How gRPC's own text begins where no connection was made; the code is UNAVAILABLE, as for a server that drains.
_NOT_CONNECTED = ("failed to connect", "DNS resolution failed", "errors resolving")


def stream_method(channel: Any) -> Any:
    """ModelStreamInfer with one message: on the wire that is a stream of one."""
    return channel.unary_stream(
        f"{_SERVICE}/ModelStreamInfer",
        request_serializer=ModelInferRequest.SerializeToString,
        response_deserializer=ModelInferResponse.FromString,
    )


def models_method(channel: Any) -> Any:
    return channel.unary_unary(
        f"{_SERVICE}/RepositoryIndex",
        request_serializer=RepositoryIndexRequest.SerializeToString,
        response_deserializer=RepositoryIndexResponse.FromString,
    )


def request_message(call: GenerationCall) -> Any:
    request = ModelInferRequest(model_name=call.model)
    for name, texts in input_tensors(call).items():
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for key, value in plain_parameters(call).items():
        _set(request.parameters.add(key=key).value, value)
    return request


def _set(parameter: Any, value: Any) -> None:
    """V2 has booleans, integers and strings over gRPC. Everything else is JSON in a string."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and value in _INT64:
        parameter.int64_param = value
    else:
        parameter.string_param = value if isinstance(value, str) else json.dumps(value)


def response_deltas(response: Any) -> list[Delta]:
    """Raises GenerationError where the response carries an error, StreamBroken where it is no answer."""
    parameters = {entry.key: value for entry in response.parameters for _, value in entry.value.ListFields()}
    try:
        outputs = [
            {"name": tensor.name, "shape": list(tensor.shape), "data": _elements(tensor.contents)}
            for tensor in response.outputs
        ]
        reply = read_reply({"outputs": outputs, "parameters": parameters})
    except UNREADABLE as error:
        raise unreadable(error) from error
    return deltas_of(reply)


def _elements(contents: Any) -> list[Any]:
    return [
        each.decode() if isinstance(each, bytes) else each for _, values in contents.ListFields() for each in values
    ]


def ready_models_request() -> Any:
    return RepositoryIndexRequest(ready=True)


def model_names(response: Any) -> list[str]:
    return sorted({model.name for model in response.models})


def call_error(url: str, error: Any, started: bool) -> ClientError:
    """The error of a failed call. ``started``: its first message has arrived."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(_NOT_CONNECTED):
        return ConnectionFailed(f"no server at {url}: {details}")
    status = _STATUS.get(code, 500)
    if started:
        return StreamBroken(f"the stream broke: {code.name}: {details}", status)
    return RequestRefused(f"the server answered {code.name}: {details}", status)
