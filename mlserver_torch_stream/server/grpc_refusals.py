"""Ends a refused gRPC call with a status, and without a traceback in the log.

MLServer logs a traceback for every error that a method raises, also for a client's mistake. It fails itself where a
stream ends without a message, or sends bytes that are no message. MLServer handles the errors of other models.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from mlserver.errors import MLServerError, ModelNotFound
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc import model_repository_pb2 as repository_pb
from mlserver.grpc.servicers import InferenceServicer
from mlserver.logging import logger

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.grpc_messages import ConvertedMessage, RefusedMessage, convert_large
from mlserver_torch_stream.server.host import GrpcMethod, find_model, grpc_code, registry_of, wrap_inside
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.status import ModelNotLoaded, RefusedCall, details_that_fit


class _NoMessage(MLServerError):  # type: ignore[misc]
    """A message is missing, or its bytes cannot be parsed."""


M = TypeVar("M", bound=Message)
# What models of ours raise, and names and versions that no model has.
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


def install() -> None:
    """Wraps MLServer's gRPC methods, below MLServer's own handling of errors. Called once."""
    for method, response in _RESPONSES.items():
        wrap_inside(method, functools.partial(answer_refusals, response))
    wrap_inside(GrpcMethod.INFER, _infer)
    wrap_inside(GrpcMethod.STREAM, _stream)


def answer_refusals(response: Callable[[], Any], original: Unary) -> Unary:
    """Ends a call that is refused with the status of its error."""

    async def answer(servicer: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return await original(servicer, request, context)
        except _REFUSALS as error:
            refuse(context, error)
            return response()  # it is not sent beside a status

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
    """The first message. Raises MLServerError if the stream has none."""
    try:
        return await anext(messages)
    except StopAsyncIteration:
        raise _no_message("the stream ended before its first message") from None
    except DecodeError as error:
        raise _no_message(str(error)) from None


def read_message(kind: type[M], raw: bytes) -> M:
    """Parses a message. Raises MLServerError if the bytes are not a message."""
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
    """All messages. A later one that cannot be decoded, or that names another model, is refused alone."""
    yield await convert_large(servicer, first, context)
    registry = registry_of(servicer)
    ours = is_ours(find_model(registry, first.model_name, first.model_version))
    try:
        async for message in following:
            model = find_model(registry, message.model_name, message.model_version)
            if ours and message.model_name and model is not find_model(registry, first.model_name, first.model_version):
                problem = "differs from that of the stream's first message, or its version does"
                yield RefusedMessage(InvalidInput("model_name", problem), message.id)
            else:
                yield await convert_large(servicer, message, context)
    except DecodeError as error:
        if not ours:
            raise
        yield RefusedMessage(InvalidInput("inputs", str(error)), "")


def refuse(context: grpc.ServicerContext, error: MLServerError) -> None:
    code = grpc_code(error)
    if not isinstance(error, RefusedCall):  # else the request has its line in the log
        logger.info(f"A gRPC call was refused with {code.name}: {str(error)!r}")  # a name may have lines
    context.set_code(code)
    context.set_details(details_that_fit(str(error)))
