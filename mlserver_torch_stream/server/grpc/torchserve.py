"""TorchServe's gRPC inference service: its messages, its methods and its errors.

Methods take and return serialized messages, so that bytes which cannot be parsed are refused like any other bad input.
Field names, numbers and types come from TorchServe's ``inference.proto``, and from ``google.rpc.Status`` and
``ErrorInfo``, which an error of ``StreamPredictions2`` contains. gRPC codes, and the class names in the second lines of
errors, are TorchServe's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from starlette.datastructures import Headers

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.message_pool import Fields, message_classes, message_file
from mlserver_torch_stream.protocol.v2_names import sequence_header
from mlserver_torch_stream.protocol.v2_tensors import check_count
from mlserver_torch_stream.server.grpc.streams import MessageStream
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.request import (
    PieceReply,
    Request,
    ServedModel,
    as_refusal,
    find_accepted,
    is_ours,
    no_handler,
)
from mlserver_torch_stream.server.rest.prediction_messages import (
    MAX_FIELDS,
    BodyField,
    MissingParameter,
    NoSuchModel,
    NoSuchVersion,
    as_json,
    request_id_of,
)
from mlserver_torch_stream.server.rest.predictions import health_of
from mlserver_torch_stream.server.status import details_that_fit
from mlserver_torch_stream.server.token_model import TokenModel

_FIELDS: Fields = {
    "PredictionsRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "input": (3, "InputEntry*"),
        "sequence_id": (4, "string"),
    },
    "InputEntry": {"key": (1, "string"), "value": (2, "bytes")},
    "PredictionResponse": {"prediction": (1, "bytes"), "sequence_id": (2, "string"), "status": (3, "Status")},
    "Status": {"code": (1, "int32"), "message": (2, "string"), "details": (3, "Any*")},
    "Any": {"type_url": (1, "string"), "value": (2, "bytes")},
    "ErrorInfo": {"reason": (1, "string")},
    "TorchServeHealthResponse": {"health": (1, "string")},
}
_PACKAGE = "org.pytorch.serve.grpc.inference"
_message_class = message_classes(_PACKAGE, _FIELDS, {})

PredictionsRequest = _message_class("PredictionsRequest")
PredictionResponse = _message_class("PredictionResponse")
ErrorInfo = _message_class("ErrorInfo")
TorchServeHealthResponse = _message_class("TorchServeHealthResponse")


def torchserve_file() -> FileDescriptorProto:
    """Returns the descriptor of the service and its messages, for reflection."""
    file = message_file(_PACKAGE, {**_FIELDS, "Empty": {}}, {}, "proto3")
    file.name = "inference.proto"
    service = file.service.add(name=SERVICE.removeprefix(f"{_PACKAGE}."))
    prediction = {"input_type": f".{_PACKAGE}.PredictionsRequest", "output_type": f".{_PACKAGE}.PredictionResponse"}
    health = {"input_type": f".{_PACKAGE}.Empty", "output_type": f".{_PACKAGE}.TorchServeHealthResponse"}
    service.method.add(name="Ping", **health)
    service.method.add(name="Predictions", **prediction)
    service.method.add(name="StreamPredictions", server_streaming=True, **prediction)
    service.method.add(name="StreamPredictions2", client_streaming=True, server_streaming=True, **prediction)
    return file


_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    416: grpc.StatusCode.OUT_OF_RANGE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# The reason of an error is in the first row whose class the error has.
_REASONS: tuple[tuple[type[RequestError], str], ...] = (
    (NoSuchModel, "org.pytorch.serve.archive.model.ModelNotFoundException"),
    (NoSuchVersion, "org.pytorch.serve.archive.model.ModelVersionNotFoundException"),
    (InvalidInput, "BadRequestException.()"),
    (RequestError, "org.pytorch.serve.http.InternalServerException"),
)


def code_of(error: RequestError) -> grpc.StatusCode:
    """Returns the gRPC code that TorchServe's services use for an error."""
    if isinstance(error, InvalidInput):
        return grpc.StatusCode.INVALID_ARGUMENT
    other = grpc.StatusCode.FAILED_PRECONDITION if error.status < 500 else grpc.StatusCode.INTERNAL
    return _CODES.get(error.status, other)


def end_call(context: grpc.ServicerContext, error: RequestError) -> None:
    """Ends the call with the status of the error."""
    context.set_code(code_of(error))
    context.set_details(f"{details_that_fit(error.message)}\n{_reason(error)}")


def status_fields(error: RequestError) -> dict[str, object]:
    """Returns an error as the fields of a ``Status`` inside a response."""
    detail = ErrorInfo(reason=_reason(error)).SerializeToString()
    return {
        "code": code_of(error).value[0],
        "message": error.message,
        "details": [{"type_url": _ERROR_INFO, "value": detail}],
    }


def _reason(error: RequestError) -> str:
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))


_TRUE = b"true"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One response. If ``error`` is set, the request has failed, and this is its last response."""

    value: bytes = b""
    sequence_id: str = ""
    error: RequestError | None = None

    def serialized(self) -> bytes:
        """Returns the bytes of the response's message."""
        status = None if self.error is None else status_fields(self.error)
        message = PredictionResponse(prediction=self.value, sequence_id=self.sequence_id, status=status)
        return bytes(message.SerializeToString())


class GrpcPrediction(Request[PieceReply]):
    """Answers one request, either with one response for each piece or with a single response. It can be used only once.

    With ``in_sequence`` the request must contain the id of its sequence or start a new sequence. The handler gets
    ``metadata`` as headers.
    """

    def __init__(
        self,
        host: ServerHost,
        lifecycle: Lifecycle,
        message: bytes,
        metadata: Mapping[str, str],
        kind: EndpointKind,
        *,
        in_sequence: bool = False,
    ) -> None:
        super().__init__(lifecycle, kind, request_id_of(Headers(dict(metadata))), door="to TorchServe's gRPC service")
        self._host = host
        self._message = message
        self._metadata = metadata
        self._in_sequence = in_sequence
        self._request: Any = PredictionsRequest()
        self._sequence: dict[str, str | bool] = {}

    async def whole(self) -> Prediction:
        """Returns one response, with all pieces joined. Raises RequestError."""
        self._read()
        async with self.entered(self._host) as model:
            return self._response(await self._open(model).whole())

    async def bodies(self) -> AsyncIterator[Prediction]:
        """Yields a response for each piece; an error is the last response."""
        try:
            self._read()
            async with self.entered(self._host) as model, aclosing(self._open(model).pieces()) as pieces:
                async for piece in pieces:
                    yield self._response(piece.value)
        except Exception as error:
            for response in self.failure(error):
                yield response

    def failure(self, error: Exception) -> Sequence[Prediction]:
        """Returns the response that reports an error while other requests go on."""
        return [self._response(error=self.refuse(error))]

    def _read(self) -> None:
        """Parses the message and finds its model. Raises RequestError."""
        try:
            self._request.ParseFromString(self._message)
        except DecodeError as error:
            raise InvalidInput("request", f"its bytes are not a PredictionsRequest: {error}") from None
        check_count("input", len(self._request.input), MAX_FIELDS, "entries")
        name = self._request.model_name
        if not name:
            raise MissingParameter("model_name")
        self.version = self._request.model_version or None
        self.model = find_accepted(self._host.registry, name, self.version, is_ours)
        if isinstance(self.model, TokenModel):
            raise no_handler(name)
        self._sequence = self._read_sequence()

    def _read_sequence(self) -> dict[str, str | bool]:
        """Returns V2's parameters of the sequence.

        The start and the end of a sequence are marked by entries of the input, which have TorchServe's names.
        """
        sequence_id = self._request.sequence_id
        if not self._in_sequence:
            return {"sequence_id": sequence_id} if sequence_id else {}
        given = {entry.key.lower(): entry.value for entry in self._request.input}
        flags = {
            name: given.get(sequence_header(name), b"").lower() == _TRUE for name in ("sequence_start", "sequence_end")
        }
        if not sequence_id and not flags["sequence_start"]:
            raise MissingParameter("sequenceId")
        return {"sequence_id": sequence_id or f"ts-seq-{uuid4()}", **flags}

    def _open(self, model: ServedModel) -> PieceReply:
        entries = {entry.key: entry.value for entry in self._request.input}  # the last of equal keys counts
        fields = [BodyField(name, "", value) for name, value in entries.items()]
        reply = model.open_prediction(fields, self._metadata, self.request_id, self.kind, self._sequence)
        self.reply = reply
        return reply

    def _response(self, value: bytes = b"", error: RequestError | None = None) -> Prediction:
        sequence_id = str(self._sequence.get("sequence_id", "")) if self._in_sequence else ""
        return Prediction(value, sequence_id, error)


SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
_CLIENT = "A client of TorchServe's gRPC service"


class InferenceService:
    """The methods of the service. A client must take each response within ``stalled_after`` seconds (0: no limit)."""

    def __init__(self, host: ServerHost, lifecycle: Lifecycle, stalled_after: float) -> None:
        self._host = host
        self._lifecycle = lifecycle
        self._stalled_after = stalled_after

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC handler of the service.

        StreamPredictions is registered as a method that takes a stream, because the interceptor of MLServer's metrics
        breaks methods that take one request and return a stream. On the wire a stream of one request is the same.
        """
        methods = {
            "Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            "Predictions": grpc.unary_unary_rpc_method_handler(self._predictions),
            "StreamPredictions": grpc.stream_stream_rpc_method_handler(partial(self._stream, False)),
            "StreamPredictions2": grpc.stream_stream_rpc_method_handler(partial(self._stream, True)),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _ping(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        health = health_of(self._host.registry, self._lifecycle)
        text = as_json({"status": health}).decode().rstrip("\n")
        return bytes(TorchServeHealthResponse(health=text).SerializeToString())

    async def _predictions(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = GrpcPrediction(self._host, self._lifecycle, message, _metadata(context), EndpointKind.GRPC_UNARY)
        try:
            return (await request.whole()).serialized()
        except Exception as error:
            end_call(context, request.refuse(error))
            return b""  # not sent, because the call ends with a status
        finally:
            request.close()

    async def _stream(
        self, in_sequence: bool, messages: AsyncIterator[bytes], context: grpc.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Answers a stream whose messages are separate requests. An error ends the call; with ``in_sequence`` it is
        sent as a response instead.
        """
        metadata = _metadata(context)

        def answer(message: bytes, index: int) -> GrpcPrediction:
            endpoint = EndpointKind.GRPC_STREAM
            return GrpcPrediction(self._host, self._lifecycle, message, metadata, endpoint, in_sequence=in_sequence)

        responses = MessageStream(messages, answer, self._stalled_after, _CLIENT, self._lifecycle)
        try:
            async for response in responses:
                if response.error is not None and not in_sequence:
                    raise response.error
                yield response.serialized()
        except Exception as error:
            end_call(context, as_refusal(error, self._lifecycle.shutdown_reason))
        finally:
            responses.close()  # the client may have disconnected


def _metadata(context: grpc.ServicerContext) -> dict[str, str]:
    """Returns the call's metadata without binary values, which a header cannot contain."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
