"""Opens the replies to requests for a handler: reads each request and gives it an observer and a reply.

Knows nothing of how requests arrive or of how replies are merged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext
from mlserver_torch_stream.protocol.v2_binary import BinaryOutputs
from mlserver_torch_stream.protocol.v2_unreadable import refuse_unreadable
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.observability.request_record import EndpointKind, RequestRecord
from mlserver_torch_stream.torchserve.handler_request import HandlerRequest
from mlserver_torch_stream.torchserve.runtime.build import BuiltPool
from mlserver_torch_stream.torchserve.runtime.handler_observer import HandlerRequestObserver
from mlserver_torch_stream.torchserve.runtime.handler_reply import HandlerReply
from mlserver_torch_stream.torchserve.v2_input import read_request
from mlserver_torch_stream.torchserve.v2_output import Reply


class HandlerOpener:
    """``built`` has the running workers."""

    most_open = 256  # requests of one gRPC stream that run at once

    def __init__(self, name: str, version: str | None, built: BuiltPool, endpoint: EndpointKind) -> None:
        self._name = name
        self._version = version
        self._built = built
        self._endpoint = endpoint

    def open(
        self,
        payload: InferenceRequest,
        request_id: str,
        index: int | None = None,
        following: AsyncIterator[InferenceRequest] | None = None,
    ) -> tuple[HandlerReply, bool]:
        try:
            request = self.read(payload, request_id)
        except RequestError as error:  # recorded here, because MLServer's gRPC methods do not
            ModelRequestObservers(self._name, self._version, self._endpoint).refused(request_id, error)
            raise
        return self.reply(request, ReplyContext(self._name, self._version, request_index=index)), False

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        reply = Reply(ReplyContext(self._name, request_index=index), HandlerRequest(request_id, ()), False)
        return lambda error: [reply.failure(error)]

    def read(self, payload: InferenceRequest, request_id: str) -> HandlerRequest:
        """Raises InvalidInput."""
        refuse_unreadable(payload)
        return read_request(payload, request_id, self._built.engine.config, self._built.archive.envelope)

    def reply(
        self, request: HandlerRequest, context: ReplyContext, binary: BinaryOutputs | None = None
    ) -> HandlerReply:
        """``binary``: over REST, the outputs that the request wants as raw bytes."""
        reply = Reply(context, request, self._built.archive.envelope in ("kserve", "kservev2"))
        record = RequestRecord(request.request_id, self._name, self._version or "", self._endpoint)
        observer = HandlerRequestObserver(record, self._built.engine.metrics)
        return HandlerReply(request, reply, self._built.engine.submit, observer, binary)
