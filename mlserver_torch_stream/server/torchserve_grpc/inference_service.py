"""TorchServe's gRPC service of inference: its methods, by their names.

Knows nothing of ports. Methods take and return the bytes of messages, so that bytes which are no message are refused
like any other bad input.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import grpc
from mlserver.handlers import DataPlane

from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.rest.prediction_errors import as_json
from mlserver_torch_stream.server.rest.refusal import as_refusal
from mlserver_torch_stream.server.rest.torchserve_routes import health_of
from mlserver_torch_stream.server.streams.message_stream import MessageStream
from mlserver_torch_stream.server.torchserve_grpc.call_status import end_call
from mlserver_torch_stream.server.torchserve_grpc.grpc_prediction import GrpcPrediction
from mlserver_torch_stream.server.torchserve_grpc.inference_messages import TorchServeHealthResponse

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
_CLIENT = "A client of TorchServe's gRPC service"


class InferenceService:
    """``stalled_after``: seconds in which a client must take a response (0: no bound)."""

    def __init__(self, data_plane: DataPlane, lifecycle: Lifecycle, stalled_after: float) -> None:
        self._data_plane = data_plane
        self._lifecycle = lifecycle
        self._stalled_after = stalled_after

    def handler(self) -> grpc.GenericRpcHandler:
        """StreamPredictions takes a stream of one request, which is the same on the wire: the interceptor of
        MLServer's metrics knows no method that takes one request and answers by several."""
        methods = {
            "Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            "Predictions": grpc.unary_unary_rpc_method_handler(self._predictions),
            "StreamPredictions": grpc.stream_stream_rpc_method_handler(partial(self._stream, False)),
            "StreamPredictions2": grpc.stream_stream_rpc_method_handler(partial(self._stream, True)),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _ping(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        health = health_of(self._data_plane._model_registry, self._lifecycle)
        text = as_json({"status": health}).decode().rstrip("\n")
        return bytes(TorchServeHealthResponse(health=text).SerializeToString())

    async def _predictions(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = GrpcPrediction(self._data_plane, message, _metadata(context), EndpointKind.GRPC_UNARY)
        try:
            return (await request.whole()).serialized()
        except Exception as error:
            end_call(context, as_refusal(error))
            return b""  # it is not sent beside a status
        finally:
            request.close()

    async def _stream(
        self, in_sequence: bool, messages: AsyncIterator[bytes], context: grpc.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Every message is a separate request. An error ends the call; where requests are of sequences, it is a
        response like any other."""
        metadata = _metadata(context)

        def answer(message: bytes, index: int) -> GrpcPrediction:
            endpoint = EndpointKind.GRPC_STREAM
            return GrpcPrediction(self._data_plane, message, metadata, endpoint, in_sequence=in_sequence)

        responses = MessageStream(messages, answer, self._stalled_after, _CLIENT)
        try:
            async for response in responses:
                if response.error is not None and not in_sequence:
                    raise response.error
                yield response.serialized()
        except Exception as error:
            end_call(context, as_refusal(error))
        finally:
            responses.close()  # the client may have left


def _metadata(context: grpc.ServicerContext) -> dict[str, str]:
    """Binary metadata, which no header can hold, is left out."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
