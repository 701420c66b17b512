"""Converts gRPC messages for our models that MLServer cannot convert, and ends refused calls with the right status.

A message that is not a valid request is refused as bad input; MLServer would report an internal error. An id that
metadata cannot contain is left out of the reply's metadata. MLServer itself logs a traceback for every error, even for
a client's mistake, and crashes if a stream ends without a message or has a message that cannot be parsed.

MLServer still converts the messages, and handles the errors, of other runtimes' models.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from mlserver.errors import MLServerError, ModelNotFound
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc import model_repository_pb2 as repository_pb
from mlserver.grpc.servicers import InferenceServicer
from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse
from pydantic import ValidationError

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.v2_request import Unreadable, first_complaint
from mlserver_torch_stream.protocol.v2_tensors import (
    MAX_PARAMETERS,
    MAX_STRINGS,
    MAX_TENSORS,
    check_count,
    check_strings,
)
from mlserver_torch_stream.protocol.values import SIZE
from mlserver_torch_stream.server.host import (
    GrpcMethod,
    Hook,
    convert_message,
    find_model,
    grpc_code,
    registry_of,
    wrap,
    wrap_inside,
)
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.status import ModelNotLoaded, RefusedCall, as_headers, details_that_fit

_RAW = "raw_input_contents"
_ON_LOOP = 16_384  # a message with more elements, or more bytes of raw contents, is converted in a thread
_SHARED_MEMORY = "shared_memory_"
# Fields of Triton's InferParameter that MLServer's message lacks: their numbers and protobuf's wire types.
_DOUBLE = (4, 1)
_UINT64 = (5, 0)


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """Takes the place of a message on a stream that is refused before its inputs are read."""

    error: InvalidInput
    id: str


@dataclass(frozen=True, slots=True)
class ConvertedMessage:
    """Takes the place of a message that is already converted; it has the fields that MLServer reads."""

    payload: InferenceRequest
    model_name: str
    model_version: str
    id: str
    raw_input_contents: bool


async def convert_large(
    servicer: InferenceServicer, request: pb.ModelInferRequest, context: grpc.ServicerContext
) -> pb.ModelInferRequest | ConvertedMessage:
    """Returns the message. A large message for our models is first converted in a thread, so that the conversion delays
    no stream.
    """
    if not _is_large(request) or not _is_ours(servicer, request.model_name, request.model_version):
        return request
    payload = await asyncio.to_thread(convert_message, servicer, request, context)
    has_raw = bool(request.raw_input_contents)
    return ConvertedMessage(payload, request.model_name, request.model_version, request.id, has_raw)


def _wrap_conversion(original: Callable[..., InferenceRequest]) -> Callable[..., InferenceRequest]:
    def convert(
        servicer: InferenceServicer,
        request: pb.ModelInferRequest | RefusedMessage | ConvertedMessage,
        context: grpc.ServicerContext,
    ) -> InferenceRequest:
        if isinstance(request, RefusedMessage):
            return Unreadable.because(request.error, request.id)
        if isinstance(request, ConvertedMessage):
            return request.payload
        if not _is_ours(servicer, request.model_name, request.model_version):
            return original(servicer, request, context)
        try:
            _check_counts(request)
            _check_raw(request)
            payload = original(servicer, request, context)
            for name, parameter in request.parameters.items():
                if (value := _unknown_value(parameter)) is not None:
                    setattr(payload.parameters, name, value)
            return payload
        except Exception as error:
            return Unreadable.because(_explain(error), request.id)

    return convert


def _wrap_metadata(original: Callable[..., None]) -> Callable[..., None]:
    def set_metadata(servicer: InferenceServicer, result: InferenceResponse, context: grpc.ServicerContext) -> None:
        parameters = result.parameters
        if parameters is not None and parameters.headers and _is_ours(servicer, result.model_name, None):
            parameters.headers = as_headers(parameters.headers)
        original(servicer, result, context)

    return set_metadata


def _is_ours(servicer: InferenceServicer, name: str, version: str | None) -> bool:
    return is_ours(find_model(registry_of(servicer), name, version))


def _is_large(request: pb.ModelInferRequest) -> bool:
    """Whether to convert the message in a thread. False if the message has too many tensors, because it is refused at
    once anyway.
    """
    if max(len(request.inputs), len(request.raw_input_contents)) > MAX_TENSORS:
        return False
    elements = sum(len(each) for tensor in request.inputs for _, each in tensor.contents.ListFields())
    return elements + sum(map(len, request.raw_input_contents)) > _ON_LOOP


def _check_counts(request: pb.ModelInferRequest) -> None:
    """Raises InvalidInput for a message that MLServer would convert for seconds."""
    check_count("inputs", len(request.inputs), MAX_TENSORS, "tensors")
    check_count("outputs", len(request.outputs), MAX_TENSORS, "tensors")
    check_count(_RAW, len(request.raw_input_contents), MAX_TENSORS, "entries")
    holders = (request, *request.inputs, *request.outputs)
    count = sum(len(holder.parameters) for holder in holders)
    check_count("parameters", count, MAX_PARAMETERS, "entries, with those of all tensors")
    for tensor in request.inputs:
        check_count(tensor.name, len(tensor.contents.bytes_contents), MAX_STRINGS, "elements")


def _check_raw(request: pb.ModelInferRequest) -> None:
    """Raises InvalidInput if the raw contents do not match the inputs; MLServer would silently drop some of them."""
    for tensor in request.inputs:
        for key in tensor.parameters:
            if key.startswith(_SHARED_MEMORY):  # the tensor is in shared memory and has no contents
                raise InvalidInput(key, "is not implemented by this runtime")
    given = request.raw_input_contents
    bare = [tensor for tensor in request.inputs if not tensor.contents.ListFields()]
    if given and len(given) != len(bare):
        raise InvalidInput(_RAW, f"has {len(given)} entries for {len(bare)} inputs without contents")
    for tensor, raw in zip(bare, given, strict=False):
        said = tensor.parameters[SIZE].int64_param if SIZE in tensor.parameters else len(raw)
        if said != len(raw):
            raise InvalidInput(tensor.name, f"{SIZE} is {said}, but the raw contents have {len(raw)} bytes")
        if tensor.datatype == "BYTES":
            check_strings(tensor.name, raw, MAX_STRINGS)


def _unknown_value(parameter: pb.InferParameter) -> float | int | None:
    """Returns a double or an unsigned integer from a client of Triton, which protobuf keeps as an unknown field."""
    if parameter.WhichOneof("parameter_choice") is not None:
        return None
    for field in UnknownFieldSet(parameter):
        kind = (field.field_number, field.wire_type)
        if kind == _DOUBLE:
            return float(struct.unpack("<d", struct.pack("<Q", field.data))[0])
        if kind == _UINT64:
            return int(field.data)
    return None


def _explain(error: Exception) -> InvalidInput:
    if isinstance(error, InvalidInput):
        return error
    if isinstance(error, ValidationError):
        return first_complaint(error)
    if isinstance(error, struct.error):
        return InvalidInput(_RAW, f"does not match datatype and shape ({error})")
    return InvalidInput("inputs", str(error))


class _NoMessage(MLServerError):  # type: ignore[misc]
    """A message is missing, or its bytes cannot be parsed."""


M = TypeVar("M", bound=Message)
# The errors that our models raise, and the errors for unknown names and versions.
_REFUSALS = (RefusedCall, ModelNotLoaded, ModelNotFound, _NoMessage)
Unary = Callable[[Any, Any, grpc.ServicerContext], Awaitable[Any]]
Stream = Callable[
    [InferenceServicer, AsyncIterator[pb.ModelInferRequest], grpc.ServicerContext], AsyncIterator[pb.ModelInferResponse]
]

_RESPONSES = {
    GrpcMethod.METADATA: pb.ModelMetadataResponse,
    GrpcMethod.LOAD: pb.RepositoryModelLoadResponse,
    GrpcMethod.UNLOAD: pb.RepositoryModelUnloadResponse,
    GrpcMethod.REPOSITORY_LOAD: repository_pb.RepositoryModelLoadResponse,
    GrpcMethod.REPOSITORY_UNLOAD: repository_pb.RepositoryModelUnloadResponse,
}


def answer_refusals(response: Callable[[], Any], original: Unary) -> Unary:
    """Wraps a method, so that a refused call ends with the status of its error."""

    async def answer(servicer: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return await original(servicer, request, context)
        except _REFUSALS as error:
            refuse(context, error)
            return response()  # not sent, because the call ends with a status

    return answer


def _infer(original: Unary) -> Unary:
    async def answer(servicer: Any, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Any:
        return await original(servicer, await convert_large(servicer, request, context), context)

    return answer_refusals(pb.ModelInferResponse, answer)


def _stream(original: Stream) -> Stream:
    async def answer(
        servicer: InferenceServicer, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> AsyncIterator[pb.ModelInferResponse]:
        messages = aiter(requests)
        try:
            first = await _first(messages)
            messages = _with_first(servicer, first, messages, context)
            async with aclosing(original(servicer, messages, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except _REFUSALS as error:
            refuse(context, error)

    return answer


async def _first(messages: AsyncIterator[pb.ModelInferRequest]) -> pb.ModelInferRequest:
    """Returns the first message. Raises MLServerError if the stream has no message, or the message cannot be parsed."""
    try:
        return await anext(messages)
    except StopAsyncIteration:
        raise _no_message("the stream ended before its first message") from None
    except DecodeError as error:
        raise _no_message(str(error)) from None


def read_message(kind: type[M], raw: bytes) -> M:
    """Parses a message. Raises MLServerError if the bytes cannot be parsed."""
    message: M = kind()
    try:
        message.ParseFromString(raw)
        return message
    except DecodeError as error:
        raise _no_message(str(error)) from None


def _no_message(why: str) -> _NoMessage:
    error = InvalidInput("inputs", why)
    return _NoMessage(error.message, error.status)


async def _with_first(
    servicer: InferenceServicer,
    first: pb.ModelInferRequest,
    following: AsyncIterator[pb.ModelInferRequest],
    context: grpc.ServicerContext,
) -> AsyncIterator[pb.ModelInferRequest | RefusedMessage | ConvertedMessage]:
    """Yields all messages of a stream. If a later message cannot be parsed or names another model, only that message is
    refused.
    """
    yield await convert_large(servicer, first, context)
    registry = registry_of(servicer)
    ours = is_ours(find_model(registry, first.model_name, first.model_version))
    try:
        async for message in following:
            model = find_model(registry, message.model_name, message.model_version)
            if ours and message.model_name and model is not find_model(registry, first.model_name, first.model_version):
                problem = "the name or the version differs from that of the stream's first message"
                yield RefusedMessage(InvalidInput("model_name", problem), message.id)
            else:
                yield await convert_large(servicer, message, context)
    except DecodeError as error:
        if not ours:
            raise
        yield RefusedMessage(InvalidInput("inputs", str(error)), "")


def refuse(context: grpc.ServicerContext, error: MLServerError) -> None:
    """Sets an error's code and details on a call, and logs the refusal if the request does not log one itself."""
    code = grpc_code(error)
    if not isinstance(error, RefusedCall):  # otherwise the request's own line is in the log
        logger.info(f"A gRPC call was refused with {code.name}: {str(error)!r}")  # a name may have line breaks
    context.set_code(code)
    context.set_details(details_that_fit(str(error)))


def install() -> None:
    """Wraps MLServer's conversion of messages and replies, and its methods inside its own error handling.

    Called once.
    """
    wrap(Hook.CONVERT, _wrap_conversion)
    wrap(Hook.SET_TRAILING_METADATA, _wrap_metadata)
    for method, response in _RESPONSES.items():
        wrap_inside(method, functools.partial(answer_refusals, response))
    wrap_inside(GrpcMethod.INFER, _infer)
    wrap_inside(GrpcMethod.STREAM, _stream)
