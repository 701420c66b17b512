"""How a refused gRPC call ends: with a status, and without a traceback in the log.

MLServer logs one for every error that a method raises, also for a client's mistake, and it fails itself where a stream
ends without a message. Knows nothing of why a call is refused. Calls to other models stay MLServer's own affair.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from mlserver.errors import MLServerError, ModelNotFound
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc import utils
from mlserver.grpc.servicers import InferenceServicer
from mlserver.logging import logger

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.status import RefusedCall

_MARK = "_torch_stream_refusals"
Unary = Callable[[InferenceServicer, Any, grpc.ServicerContext], Awaitable[Any]]
Stream = Callable[
    [InferenceServicer, AsyncIterator[pb.ModelInferRequest], grpc.ServicerContext], AsyncIterator[pb.ModelInferResponse]
]


def install() -> None:
    """Wraps what MLServer's methods do inside their own handling of errors. Idempotent."""
    if getattr(InferenceServicer, _MARK, False):
        return
    setattr(InferenceServicer, _MARK, True)
    _wrap_inside(InferenceServicer.ModelInfer, functools.partial(_unary, pb.ModelInferResponse))
    _wrap_inside(InferenceServicer.ModelMetadata, functools.partial(_unary, pb.ModelMetadataResponse))
    _wrap_inside(InferenceServicer.ModelStreamInfer, _stream)


def _wrap_inside(method: Any, wrap: Callable[[Any], Any]) -> None:
    """Replaces the function that MLServer's decorator calls.

    The method itself cannot be replaced: the gRPC server has taken it when the first model of ours is loaded.
    """
    cell = method.__closure__[method.__code__.co_freevars.index("f")]
    cell.cell_contents = functools.wraps(cell.cell_contents)(wrap(cell.cell_contents))


def _unary(response: Callable[[], Any], original: Unary) -> Unary:
    async def answer(servicer: InferenceServicer, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return await original(servicer, request, context)
        except MLServerError as error:
            if not _is_ours(error):
                raise
            _refuse(context, error)
            return response()  # it is not sent beside a status

    return answer


def _stream(original: Stream) -> Stream:
    async def answer(
        servicer: InferenceServicer, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> AsyncIterator[pb.ModelInferResponse]:
        messages = aiter(requests)
        first = await anext(messages, None)
        if first is None:
            empty = InvalidInput("inputs", "the stream ended before its first message")
            _refuse(context, MLServerError(empty.message, empty.status))
            return
        try:
            async with aclosing(original(servicer, _with_first(first, messages), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except MLServerError as error:
            if not _is_ours(error):
                raise
            _refuse(context, error)

    return answer


async def _with_first(
    first: pb.ModelInferRequest, others: AsyncIterator[pb.ModelInferRequest]
) -> AsyncIterator[pb.ModelInferRequest]:
    yield first
    async for message in others:
        yield message


def _is_ours(error: MLServerError) -> bool:
    """What a model of ours has refused, and names and versions that no model has, also while one is unloaded."""
    return isinstance(error, RefusedCall | ModelNotFound)


def _refuse(context: grpc.ServicerContext, error: MLServerError) -> None:
    code = utils._grpc_status_code(error)
    if not isinstance(error, RefusedCall):  # else the request has its line in the log
        logger.info(f"A gRPC call was refused with {code.name}: {error}")
    context.set_code(code)
    context.set_details(str(error))
