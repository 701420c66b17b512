"""The replies to one message of a Triton stream. Each message is a separate request; an error is a message too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

import grpc
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.converters import ModelInferResponseConverter
from mlserver.grpc.servicers import InferenceServicer

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.v2_names import FINISH_REASON
from mlserver_torch_stream.protocol.v2_reply import as_response
from mlserver_torch_stream.server.grpc_messages import convert_large
from mlserver_torch_stream.server.grpc_refusals import read_message
from mlserver_torch_stream.server.host import ServerHost, convert_message
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.request import MessageRequest, Reply, Request
from mlserver_torch_stream.server.status import StreamStatus
from mlserver_torch_stream.server.triton.triton_messages import ModelStreamInferResponse
from mlserver_torch_stream.types import FinishReason

_MAX_ID_CHARACTERS = 256  # of an id that a message of an error repeats


@dataclass(frozen=True, slots=True)
class Framed:
    """One response and, where the request has failed, the error in Triton's own field.

    ``status``: the HTTP status that REST has for the error.
    """

    response: pb.ModelInferResponse
    error: str = ""
    status: int = 0

    def serialized(self) -> bytes:
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
        """The final responses of the sequences that have none; a single one with the error if nothing was sent."""
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
        other = InvalidInput("model_name", f"{name} is a model of another runtime: stream from it on MLServer's port")
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
        """The message with the request's id, in Triton's form: of an error, Triton's clients show this text alone."""
        return f"[request id: {self._request.id[:_MAX_ID_CHARACTERS] or '<id_unknown>'}] {message}"


def _error_of(body: JsonObject) -> str:
    """The error of this response's own sequence; none where it has ended with ``timeout`` or ``abort``: Triton's
    clients would not see the text beside an error."""
    reasons = [tensor["data"] for tensor in body["outputs"] if tensor["name"] == FINISH_REASON]
    failed = reasons in ([], [[FinishReason.ERROR.value]])
    return str(body["parameters"].get("error", "")) if failed else ""
