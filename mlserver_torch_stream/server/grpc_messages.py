"""gRPC messages that are no request at all: refused as the bad input that they are.

MLServer reports what it cannot convert as a failure of its own, INTERNAL. Knows nothing of what a request means; other
models' messages stay MLServer's own affair.
"""

from __future__ import annotations

import functools
import struct

import grpc
from mlserver.errors import MLServerError
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.servicers import InferenceServicer
from mlserver.types import InferenceRequest
from pydantic import ValidationError

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.rest.refusal import as_invalid_input
from mlserver_torch_stream.server.rest.routes import find_model
from mlserver_torch_stream.server.status import as_server_error

_MARK = "_torch_stream_messages"
_RAW = "raw_input_contents"


def install() -> None:
    """Wraps the conversion of a message to our models. Idempotent."""
    original = InferenceServicer._InsertHeaders
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def convert(
        servicer: InferenceServicer, request: pb.ModelInferRequest, context: grpc.ServicerContext
    ) -> InferenceRequest:
        registry = servicer._data_plane._model_registry
        model = find_model(registry, request.model_name, request.model_version)
        if not getattr(model, "streams_tokens", False):
            return original(servicer, request, context)
        try:
            _check_count(request)
            return original(servicer, request, context)
        except MLServerError:
            raise
        except Exception as error:
            raise as_server_error(_explain(error), streaming=False) from None

    setattr(convert, _MARK, True)
    InferenceServicer._InsertHeaders = convert


def _check_count(request: pb.ModelInferRequest) -> None:
    """MLServer takes what it needs of the raw contents and drops the rest."""
    given = len(request.raw_input_contents)
    expected = sum(not tensor.contents.ByteSize() for tensor in request.inputs)
    if given and given != expected:
        raise InvalidInput(_RAW, f"there are {given} for {expected} inputs without contents")


def _explain(error: Exception) -> InvalidInput:
    if isinstance(error, InvalidInput):
        return error
    if isinstance(error, ValidationError):
        return as_invalid_input(error)
    if isinstance(error, struct.error):
        return InvalidInput(_RAW, f"is not what datatype and shape say ({error})")
    return InvalidInput("inputs", str(error))
