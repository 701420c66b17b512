"""Triton's gRPC service: its methods, and the replies to the messages of its streams.

Methods that MLServer also has are answered by MLServer's servicer. Methods take and return serialized messages, so that
bytes which cannot be parsed are refused like any other bad input. On a stream each message is a separate request, and
an error is sent as a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.converters import ModelInferResponseConverter
from mlserver.grpc.servicers import InferenceServicer
from mlserver.grpc.utils import handle_mlserver_error
from mlserver.types import RepositoryIndexRequest

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, RequestError
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.v2_names import FINISH_REASON
from mlserver_torch_stream.protocol.v2_reply import as_response
from mlserver_torch_stream.server.grpc.messages import answer_refusals, convert_large, read_message, refuse
from mlserver_torch_stream.server.grpc.streams import MessageStream
from mlserver_torch_stream.server.grpc.triton_messages import (
    ModelConfigResponse,
    ModelStatisticsResponse,
    ModelStreamInferResponse,
)
from mlserver_torch_stream.server.host import ServerHost, convert_message, find_model, send_headers
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.model_info import read_config, read_statistics
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.request import MessageRequest, Reply, Request, as_refusal
from mlserver_torch_stream.server.state import ServerState
from mlserver_torch_stream.server.status import RefusedCall, StreamStatus, as_server_error
from mlserver_torch_stream.types import FinishReason

_MAX_ID_CHARACTERS = 256  # characters of a request's id that an error repeats


@dataclass(frozen=True, slots=True)
class Framed:
    """One response. If the request has failed, ``error`` is the text for Triton's error field, and ``status`` the REST
    status.
    """

    response: pb.ModelInferResponse
    error: str = ""
    status: int = 0

    def serialized(self) -> bytes:
        """Returns the bytes of a ``ModelStreamInferResponse``."""
        message = ModelStreamInferResponse(error_message=self.error, infer_response=self.response.SerializeToString())
        return bytes(message.SerializeToString())


class TritonReply(Request[Reply]):
    """Reads one message and answers it. Every response has the id of its request."""

    def __init__(
        self,
        host: ServerHost,
        lifecycle: Lifecycle,
        servicer: InferenceServicer,
        context: grpc.ServicerContext,
        message: bytes,
        index: int,
    ) -> None:
        super().__init__(lifecycle, EndpointKind.GRPC_STREAM, door="on Triton's port")
        self._host = host
        self._servicer = servicer
        self._context = context
        self._message = message
        self._index = index
        self._request = pb.ModelInferRequest()
        self._begun = False

    async def bodies(self) -> AsyncIterator[Framed]:
        """Yields the responses to the message."""
        try:
            self._request = read_message(pb.ModelInferRequest, self._message)
            async for body in self._answer():
                framed = self._framed(body)
                self._begun = True
                yield framed
        except Exception as error:
            for framed in self.failure(error):
                yield framed

    def failure(self, error: Exception) -> Sequence[Framed]:
        """Returns a final response for each sequence that has not got one. If nothing was sent, returns one response
        with the error.
        """
        refusal = self.refuse(error)
        if self._begun and self.reply is not None:
            return [self._framed(body) for body in self.reply.failure(error)]
        request = self._request
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version)
        response.id = request.id
        response.parameters["triton_final_response"].bool_param = True
        response.parameters["request_index"].int64_param = self._index
        status = StreamStatus(refusal.status) if isinstance(error, NotServing) else refusal.status
        return [Framed(response, self._named(refusal.message), status)]

    async def _answer(self) -> AsyncIterator[JsonObject]:
        request = self._request
        self.request_id = request.id or str(uuid4())
        name = request.model_name
        other = InvalidInput("model_name", f"{name} belongs to another runtime; stream from it on MLServer's port")
        self.find(self._host.registry, name, request.model_version or None, other)
        converted = await convert_large(self._servicer, request, self._context)
        payload = convert_message(self._servicer, converted, self._context)
        async with self.entered(self._host) as model:
            reply = self.reply = model.message_reply(MessageRequest(payload, self.request_id, self.kind, self._index))
            async for body in reply.bodies():
                yield body

    def _framed(self, body: JsonObject) -> Framed:
        response: pb.ModelInferResponse = ModelInferResponseConverter.from_types(as_response(body), use_raw=True)
        response.id = self._request.id
        error = _error_of(body)
        return Framed(response, self._named(error), GenerationFailed.status) if error else Framed(response)

    def _named(self, message: str) -> str:
        """Puts the request's id before a message, as Triton does, because Triton's clients show only this text of an
        error.
        """
        return f"[request id: {self._request.id[:_MAX_ID_CHARACTERS] or '<id_unknown>'}] {message}"


def _error_of(body: JsonObject) -> str:
    """Returns the error of the response's sequence.

    It is empty if the sequence ended with ``timeout`` or ``abort``: Triton's clients drop the text that comes with an
    error.
    """
    reasons = [tensor["data"] for tensor in body["outputs"] if tensor["name"] == FINISH_REASON]
    failed = reasons in ([], [[FinishReason.ERROR.value]])
    return str(body["parameters"].get("error", "")) if failed else ""


SERVICE = "inference.GRPCInferenceService"
_ERRORS_END_IT = "triton_grpc_error"
# The methods that MLServer's servicer answers as Triton's clients expect.
_DELEGATED: dict[str, type[Message]] = {
    "ServerLive": pb.ServerLiveRequest,
    "ServerReady": pb.ServerReadyRequest,
    "ServerMetadata": pb.ServerMetadataRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
}
_LOADING = "load and unload models on MLServer's own ports"
_MEMORY = "send tensors in the messages"
_REFUSED = {
    "RepositoryModelLoad": _LOADING,
    "RepositoryModelUnload": _LOADING,
    **dict.fromkeys(
        (f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
        _MEMORY,
    ),
    "TraceSetting": "tracing is set by MLServer's tracing_server when the server starts",
    "LogSettings": "logging is configured when the server starts",
}

Unary = Callable[[bytes, grpc.ServicerContext], Awaitable[bytes]]


class TritonServicer:
    """The methods of the service. A client must take each response within ``stalled_reader_timeout`` seconds; 0 means
    no limit.
    """

    def __init__(self, host: ServerHost, state: ServerState, stalled_reader_timeout: float) -> None:
        self._host = host
        self._state = state
        self._inference = host.servicer()  # MLServer's servicer
        self._stalled_reader_timeout = stalled_reader_timeout

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC handler of the service."""
        unary: dict[str, Unary] = {
            "ModelReady": self._model_ready,
            "ModelInfer": self._model_infer,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            **{name: self._delegated(name, request) for name, request in _DELEGATED.items()},
            **{name: _refused(name, instead) for name, instead in _REFUSED.items()},
        }
        methods = {name: grpc.unary_unary_rpc_method_handler(_guarded(method)) for name, method in unary.items()}
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _model_ready(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """For an unknown model, returns that the model is not ready instead of an error, as Triton does."""
        request = read_message(pb.ModelReadyRequest, message)
        model = find_model(self._host.registry, request.name, request.version)
        return bytes(pb.ModelReadyResponse(ready=model is not None and model.ready).SerializeToString())

    async def _model_infer(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """Outputs are always sent as raw contents, because Triton's clients read only those."""
        request = read_message(pb.ModelInferRequest, message)
        payload = convert_message(self._inference, await convert_large(self._inference, request, context), context)
        result = await self._host.data_plane.infer(payload, request.model_name, request.model_version)
        send_headers(self._inference, result, context)
        return bytes(ModelInferResponseConverter.from_types(result, use_raw=True).SerializeToString())

    async def _model_config(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = read_message(pb.ModelMetadataRequest, message)  # the same two fields
        config = await read_config(self._host, self._state, request.name, request.version)
        return _from_json({"config": config}, ModelConfigResponse)

    async def _model_statistics(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = read_message(pb.ModelMetadataRequest, message)  # the same two fields
        statistics = await read_statistics(self._host, self._state, request.name, request.version)
        return _from_json(statistics, ModelStatisticsResponse)

    async def _repository_index(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """Does not use MLServer's servicer, which writes a state as Python's ``State.READY`` instead of ``READY``."""
        request = read_message(pb.RepositoryIndexRequest, message)
        index = await self._host.repository_handlers.index(RepositoryIndexRequest(ready=request.ready))
        response = pb.RepositoryIndexResponse()
        for item in index.root:
            response.models.add(name=item.name, version=item.version, state=item.state.value, reason=item.reason)
        return bytes(response.SerializeToString())

    async def _model_stream_infer(
        self, messages: AsyncIterator[bytes], context: grpc.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Answers a stream whose messages are separate requests. At a shutdown the call ends with UNAVAILABLE.

        If the call's metadata contain ``triton_grpc_error: true``, the first error ends the call with the error's
        status.
        """
        errors_end_it = (_ERRORS_END_IT, "true") in {(key, value) for key, value in context.invocation_metadata()}

        lifecycle = self._state.lifecycle

        def answer(message: bytes, index: int) -> TritonReply:
            return TritonReply(self._host, lifecycle, self._inference, context, message, index)

        responses = MessageStream(
            messages, answer, self._stalled_reader_timeout, "A client of Triton's port", lifecycle
        )
        try:
            async for response in responses:
                if response.error and errors_end_it:
                    raise RefusedCall(response.error, response.status)
                yield response.serialized()
        except RefusedCall as error:
            refuse(context, error)
        except RequestError as error:
            refuse(context, as_server_error(error, streaming=True))
        except Exception as error:
            refusal = as_refusal(error, lifecycle.shutdown_reason)
            refuse(context, RefusedCall(refusal.message, refusal.status))
        finally:
            responses.close()  # the client may have disconnected

    def _delegated(self, name: str, request: type[Message]) -> Unary:
        async def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            response = await getattr(self._inference, name)(read_message(request, message), context)
            return bytes(response.SerializeToString())

        return answer


def _guarded(method: Unary) -> Unary:
    """Wraps a method, so that a failed call ends with the status of its error."""

    async def answer(servicer: None, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return await method(message, context)
        except RequestError as error:
            raise as_server_error(error, streaming=False) from None

    guarded = handle_mlserver_error(answer_refusals(bytes, answer))

    async def call(message: bytes, context: grpc.ServicerContext) -> Any:
        return await guarded(None, message, context)

    return call


def _refused(name: str, instead: str) -> Unary:
    async def refuse(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details(f"{name} is not implemented: {instead}")
        return b""  # not sent, because the call ends with a status

    return refuse


def _from_json(body: JsonObject, kind: type[Message]) -> bytes:
    return bytes(json_format.ParseDict(body, kind()).SerializeToString())
