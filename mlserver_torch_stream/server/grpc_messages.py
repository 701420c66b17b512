"""What MLServer makes of gRPC messages, and of their answers, that it cannot convert.

A message that is no request is refused as the bad input that it is, where MLServer reports a failure of its own; and an
id that metadata cannot carry fails no answer. Knows nothing of what a request means; other models' messages stay
MLServer's own affair.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.servicers import InferenceServicer
from mlserver.types import InferenceRequest, InferenceResponse
from pydantic import ValidationError

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.v2_binary import SIZE
from mlserver_torch_stream.protocol.v2_request import first_complaint
from mlserver_torch_stream.protocol.v2_unreadable import Unreadable
from mlserver_torch_stream.server.cloud_events import as_headers
from mlserver_torch_stream.server.grpc_parameters import fill_in
from mlserver_torch_stream.server.rest.routes import find_model

_MARK = "_torch_stream_messages"
_RAW = "raw_input_contents"


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message on a stream that is refused without a look at its inputs, in the place of that message."""

    error: InvalidInput
    id: str


def install() -> None:
    """Wraps the conversion of messages to and answers from our models. Idempotent."""
    if getattr(InferenceServicer._InsertHeaders, _MARK, False):
        return
    InferenceServicer._InsertHeaders = _reading(InferenceServicer._InsertHeaders)
    InferenceServicer._SetTrailingMetadata = _closing(InferenceServicer._SetTrailingMetadata)


def _reading(original: Callable[..., InferenceRequest]) -> Callable[..., InferenceRequest]:
    @functools.wraps(original)
    def convert(
        servicer: InferenceServicer, request: pb.ModelInferRequest | RefusedMessage, context: grpc.ServicerContext
    ) -> InferenceRequest:
        if isinstance(request, RefusedMessage):
            return Unreadable.because(request.error, request.id)
        if not _is_ours(servicer, request.model_name, request.model_version):
            return original(servicer, request, context)
        try:
            _check_raw(request)
            payload = original(servicer, request, context)
            fill_in(payload, request)
            return payload
        except Exception as error:
            return Unreadable.because(_explain(error), request.id)

    setattr(convert, _MARK, True)
    return convert


def _closing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_metadata(servicer: InferenceServicer, result: InferenceResponse, context: grpc.ServicerContext) -> None:
        parameters = result.parameters
        if parameters is not None and parameters.headers and _is_ours(servicer, result.model_name, None):
            parameters.headers = as_headers(parameters.headers)
        original(servicer, result, context)

    return set_metadata


def _is_ours(servicer: InferenceServicer, name: str, version: str | None) -> bool:
    model = find_model(servicer._data_plane._model_registry, name, version)
    return bool(getattr(model, "streams_tokens", False))


def _check_raw(request: pb.ModelInferRequest) -> None:
    """MLServer takes what it needs of the raw contents and drops the rest."""
    given = request.raw_input_contents
    bare = [tensor for tensor in request.inputs if not tensor.contents.ByteSize()]
    if given and len(given) != len(bare):
        raise InvalidInput(_RAW, f"there are {len(given)} for {len(bare)} inputs without contents")
    for tensor, raw in zip(bare, given, strict=False):
        said = tensor.parameters[SIZE].int64_param if SIZE in tensor.parameters else len(raw)
        if said != len(raw):
            raise InvalidInput(tensor.name, f"{SIZE} is {said}, its raw contents have {len(raw)} bytes")


def _explain(error: Exception) -> InvalidInput:
    if isinstance(error, InvalidInput):
        return error
    if isinstance(error, ValidationError):
        return first_complaint(error)
    if isinstance(error, struct.error):
        return InvalidInput(_RAW, f"is not what datatype and shape say ({error})")
    return InvalidInput("inputs", str(error))
