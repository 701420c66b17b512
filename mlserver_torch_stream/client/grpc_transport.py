"""Carries calls in the V2 protocol over gRPC, synchronously and for asyncio.

The messages have MLServer's field numbers and types and are built without MLServer, whose import loads a whole server.
Nested message types and maps are declared at the top level, which does not change the bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping
from typing import Any

import grpc

from mlserver_torch_stream.client.address import grpc_target
from mlserver_torch_stream.client.call import (
    UNREADABLE,
    ClientError,
    ConnectionFailed,
    Delta,
    GenerationCall,
    RequestRefused,
    StreamBroken,
    StreamEnding,
    unreadable,
)
from mlserver_torch_stream.client.v2_json import deltas_of, input_tensors, plain_parameters
from mlserver_torch_stream.message_pool import Fields, message_classes
from mlserver_torch_stream.v2_reader import read_reply

_FIELDS: Fields = {
    "InferParameter": {"bool_param": (1, "bool"), "int64_param": (2, "int64"), "string_param": (3, "string")},
    "ParameterEntry": {"key": (1, "string"), "value": (2, "InferParameter")},
    "InferTensorContents": {
        "bool_contents": (1, "bool*"),
        "int_contents": (2, "int32*"),
        "int64_contents": (3, "int64*"),
        "uint_contents": (4, "uint32*"),
        "uint64_contents": (5, "uint64*"),
        "fp32_contents": (6, "float*"),
        "fp64_contents": (7, "double*"),
        "bytes_contents": (8, "bytes*"),
    },
    "InferTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "int64*"),
        "parameters": (4, "ParameterEntry*"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "ParameterEntry*"),
        "inputs": (5, "InferTensor*"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "ParameterEntry*"),
        "outputs": (5, "InferTensor*"),
    },
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "ModelIndex": {"name": (1, "string"), "version": (2, "string"), "state": (3, "string"), "reason": (4, "string")},
    "RepositoryIndexResponse": {"models": (1, "ModelIndex*")},
}

_message = message_classes("mlserver_torch_stream.client", _FIELDS, {}, syntax="proto2")

ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
RepositoryIndexRequest = _message("RepositoryIndexRequest")
RepositoryIndexResponse = _message("RepositoryIndexResponse")


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
    """Returns ModelStreamInfer as a method that takes one message: on the wire that is a stream of one."""
    return channel.unary_stream(
        f"{_SERVICE}/ModelStreamInfer",
        request_serializer=ModelInferRequest.SerializeToString,
        response_deserializer=ModelInferResponse.FromString,
    )


def models_method(channel: Any) -> Any:
    """Returns the unary call of ``RepositoryIndex`` on a channel."""
    return channel.unary_unary(
        f"{_SERVICE}/RepositoryIndex",
        request_serializer=RepositoryIndexRequest.SerializeToString,
        response_deserializer=RepositoryIndexResponse.FromString,
    )


def request_message(call: GenerationCall) -> Any:
    """Returns the ``ModelInferRequest`` of a call."""
    request = ModelInferRequest(model_name=call.model)
    for name, texts in input_tensors(call).items():
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for key, value in plain_parameters(call).items():
        _set(request.parameters.add(key=key).value, value)
    return request


def _set(parameter: Any, value: Any) -> None:
    """Sets a parameter. In V2 over gRPC, a parameter is a boolean, an integer or a string; other values are sent as
    JSON in a string.
    """
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and value in _INT64:
        parameter.int64_param = value
    else:
        parameter.string_param = value if isinstance(value, str) else json.dumps(value)


def response_deltas(response: Any) -> list[Delta]:
    """Returns the deltas of a response. Raises GenerationError if the response carries an error, and StreamBroken if it
    is not an answer.
    """
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
    """Returns a request for the models that are ready."""
    return RepositoryIndexRequest(ready=True)


def model_names(response: Any) -> list[str]:
    """Returns the names in a response of ``RepositoryIndex``, sorted and without duplicates."""
    return sorted({model.name for model in response.models})


def call_error(url: str, error: Any, started: bool) -> ClientError:
    """Returns the error of a failed call. ``started`` means that the first message of the response has arrived."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(_NOT_CONNECTED):
        return ConnectionFailed(f"no server at {url}: {details}")
    status = _STATUS.get(code, 500)
    if started:
        return StreamBroken(f"the stream broke: {code.name}: {details}", status)
    return RequestRefused(f"the server answered {code.name}: {details}", status)


class GrpcTransport:
    """Makes calls that block. Closing the generator of a stream cancels its call."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None) -> None:
        self._url = url
        self._metadata = _metadata(headers)
        self._timeout = timeout
        self._channel = _open_channel(grpc, url, authorities)

    def stream(self, call: GenerationCall) -> Generator[Delta, None, None]:
        rpc = stream_method(self._channel)(request_message(call), metadata=self._metadata)
        watch = SilenceWatch(rpc, self._timeout)
        ending = StreamEnding()
        try:
            while (response := watch.next()) is not None:
                yield from ending.note(response_deltas(response))
        except grpc.RpcError as error:
            if watch.fired:
                raise ending.broken(_silence(self._timeout)) from error
            raise call_error(self._url, error, ending.started) from error
        finally:
            watch.close()
            rpc.cancel()
        ending.check()

    def models(self) -> list[str]:
        ask = models_method(self._channel)
        try:
            return model_names(ask(ready_models_request(), metadata=self._metadata, timeout=self._timeout))
        except grpc.RpcError as error:
            raise call_error(self._url, error, started=False) from error

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """Makes the same calls for asyncio. The channel is opened at the first call, because it belongs to the event loop
    that is running then.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None) -> None:
        self._url = url
        self._metadata = _metadata(headers)
        self._timeout = timeout
        self._authorities = authorities
        self._channel: Any = None

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        rpc = stream_method(self._opened())(request_message(call), metadata=self._metadata)
        ending = StreamEnding()
        try:
            while (response := await _result(rpc.read(), self._timeout)) is not grpc.aio.EOF:
                for delta in ending.note(response_deltas(response)):
                    yield delta
        except asyncio.TimeoutError as error:
            raise ending.broken(_silence(self._timeout)) from error
        except grpc.RpcError as error:
            raise call_error(self._url, error, ending.started) from error
        finally:
            rpc.cancel()
        ending.check()

    async def models(self) -> list[str]:
        ask = models_method(self._opened())
        try:
            call = ask(ready_models_request(), metadata=self._metadata, timeout=self._timeout)
            return model_names(await _result(call, None))
        except grpc.RpcError as error:
            raise call_error(self._url, error, started=False) from error

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _opened(self) -> Any:
        if self._channel is None:
            self._channel = _open_channel(grpc.aio, self._url, self._authorities)
        return self._channel


async def _result(pending: Awaitable[Any], seconds: float | None) -> Any:
    """Returns the result of a call. Raises TimeoutError if the call takes longer than ``seconds``, and StreamBroken if
    the client was closed: gRPC then cancels the call, but the waiting task must not appear cancelled.
    """
    reading = asyncio.ensure_future(pending)
    try:
        done, _ = await asyncio.wait([reading], timeout=seconds)
    finally:
        reading.cancel()
        reading.add_done_callback(_retrieve)
    if not done:
        raise asyncio.TimeoutError
    if reading.cancelled():
        raise StreamBroken("the stream broke: the client was closed")
    return reading.result()


def _retrieve(reading: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging an exception that was raised after the task was cancelled."""
    if not reading.cancelled():
        reading.exception()


class SilenceWatch:
    """Cancels a call whose next message does not arrive in time. A thread watches, because a blocking read has no
    timeout.

    The time that the caller spends on a message does not count.
    """

    def __init__(self, rpc: Any, seconds: float) -> None:
        self.fired = False
        self._rpc = rpc
        self._seconds = seconds
        self._due = math.inf
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def next(self) -> Any:
        """Returns the next message; None after the last."""
        self._due = time.monotonic() + self._seconds
        message = next(self._rpc, None)
        self._due = math.inf
        return message

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._due - time.monotonic(), self._seconds)):
            if time.monotonic() >= self._due:
                self.fired = True
                self._rpc.cancel()
                return


def _open_channel(library: Any, url: str, authorities: bytes | None) -> Any:
    if url.startswith("grpcs:"):
        return library.secure_channel(grpc_target(url), grpc.ssl_channel_credentials(authorities))
    return library.insecure_channel(grpc_target(url))


def _metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in headers.items())


def _silence(seconds: float) -> str:
    return f"the stream broke: no data arrived for {seconds:g} s"
