"""Opens the replies to requests for a handler: reads them and gives each an observer and a job.

Knows nothing of how requests arrive or of how replies are merged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext
from mlserver_torch_stream.protocol.v2_binary import BinaryOutputs
from mlserver_torch_stream.protocol.v2_unreadable import refuse_unreadable
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.torchserve.handler_metrics import HANDLER_METRICS
from mlserver_torch_stream.torchserve.handler_request import HandlerRequest
from mlserver_torch_stream.torchserve.runtime.build import BuiltPool, envelope_of
from mlserver_torch_stream.torchserve.runtime.handler_observer import HandlerRequestObserver
from mlserver_torch_stream.torchserve.runtime.handler_reply import HandlerReply
from mlserver_torch_stream.torchserve.v2_input import read_request
from mlserver_torch_stream.torchserve.v2_output import Reply


class HandlerOpener:
    """``model`` holds the running workers; asking it raises NotServing when there are none."""

    most_open = 256  # requests of one gRPC stream that run at once

    def __init__(self, name: str, version: str | None, model: ModelSlot[BuiltPool], entrance: EndpointKind) -> None:
        self._name = name
        self._version = version
        self._model = model
        self._entrance = entrance

    def first(
        self, payload: InferenceRequest, request_id: str, following: AsyncIterator[InferenceRequest]
    ) -> tuple[HandlerReply, bool]:
        return self.open(payload, request_id, 0), False

    def further(self, payload: InferenceRequest, request_id: str, index: int) -> HandlerReply:
        return self.open(payload, request_id, index)

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        context = ReplyContext(self._name, request_index=index)
        return partial(_failure, Reply(context, HandlerRequest(request_id, ()), False))

    def open(self, payload: InferenceRequest, request_id: str, index: int | None) -> HandlerReply:
        """The reply to a gRPC message. Raises RequestError, which no endpoint records."""
        try:
            request = self.read(payload, request_id)
        except RequestError as error:
            ModelRequestObservers(self._name, self._version, self._entrance).refused(request_id, error)
            raise
        return self.reply(request, ReplyContext(self._name, self._version, request_index=index))

    def read(self, payload: InferenceRequest, request_id: str) -> HandlerRequest:
        built = self._model.built
        refuse_unreadable(payload)
        return read_request(payload, request_id, built.engine.config, envelope_of(built.archive))

    def reply(
        self, request: HandlerRequest, context: ReplyContext, binary: BinaryOutputs | None = None
    ) -> HandlerReply:
        """``binary``: over REST, the outputs that the request wants as raw bytes."""
        built = self._model.built
        reply = Reply(context, request, envelope_of(built.archive) == "kservev2")
        metrics = HANDLER_METRICS.of(self._name, self._version)
        observer = HandlerRequestObserver(request.request_id, self._name, self._version, self._entrance, metrics)
        return HandlerReply(request, reply, built.engine.submit, observer, binary)


def _failure(reply: Reply, error: Exception) -> Sequence[JsonObject]:
    return [reply.failure(error)]
