"""The MLServer runtime for TorchServe handlers: ``implementation: mlserver_torch_stream.TorchServeRuntime``.

MLServer may reload this module at any time, so it holds no state. Endpoints, drain and errors are shared with the token
models, in ``server``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from mlserver.logging import logger
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import NotServing
from mlserver_torch_stream.handlers.config.model_config import KEYS, OURS
from mlserver_torch_stream.handlers.pool.handler_metrics import HANDLER_METRICS
from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest, RequestPart
from mlserver_torch_stream.handlers.runtime.build import BuiltPool, build, describe_pool
from mlserver_torch_stream.handlers.runtime.reply import (
    HandlerReply,
    HandlerRequestObserver,
    PredictionReply,
    read_posted,
)
from mlserver_torch_stream.handlers.runtime.v2_messages import PieceEncoder, read_body, read_parts, read_request
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.protocol.v2_reply import read_posted_request
from mlserver_torch_stream.protocol.v2_request import refuse_unreadable
from mlserver_torch_stream.protocol.v2_tensors import BinaryOutputs, has_tensors
from mlserver_torch_stream.protocol.values import refuse_left_over
from mlserver_torch_stream.server.base_runtime import BaseRuntime
from mlserver_torch_stream.server.lifecycle.lifecycle import ModelSlot
from mlserver_torch_stream.server.observability.request_observer import EndpointKind, RequestRecord
from mlserver_torch_stream.server.observability.request_reports import join_mlservers_log
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.request import HandlerModel, MessageRequest, RestRequest
from mlserver_torch_stream.server.rest.connection import parse_object
from mlserver_torch_stream.server.rest.prediction_messages import BodyField


class TorchServeRuntime(BaseRuntime, HandlerModel):
    """Serves a TorchServe archive or handler, unchanged, in separate worker processes."""

    _slot: ModelSlot[BuiltPool]
    extra_keys = (*KEYS, *OURS)

    async def load(self) -> bool:
        """Starts the model's workers. Raises SettingsError or LoadFailed."""
        join_mlservers_log()
        loop = asyncio.get_running_loop()
        with self._loading():
            built = await self._slot.load(lambda _: build(self.settings, loop))
        if built is None:
            return False
        HANDLER_METRICS.torchserve_names = read_options().torchserve_metric_names
        logger.info(f"Model '{self.name}': {built.summary}")
        return True

    async def unload(self) -> bool:
        """Drains the model, and ends its workers."""
        await self._slot.unload()
        return True

    def parse(self, raw: bytes, content_type: str, route: RestRoute) -> dict[str, Any] | RequestPart:
        """Parses a request's body: JSON on V2's paths; on the paths of ``generate`` whatever TorchServe accepts."""
        return read_posted(raw, content_type) if FLAT in route.spellings else parse_object(raw)

    def reply(self, request: RestRequest) -> HandlerReply:
        """Returns the reply to a V2 request or, on the paths of ``generate``, to a body in the handler's own format."""
        posted, built = request.posted, self._slot.built
        body = posted.json
        own = isinstance(body, RequestPart) or (FLAT in request.route.spellings and not has_tensors(body))
        request_id = str((body.get("id") if isinstance(body, dict) else None) or uuid4())
        if own:
            refuse_left_over(len(posted.raw))
            handled = read_body(body, posted.headers, request_id, built.engine.config)
        else:
            payload = read_posted_request(posted, len(posted.raw), streaming=request.endpoint.streams)
            handled = self._read(payload, request_id)
        return self._reply(handled, request.endpoint, request.context(request_id), BinaryOutputs.wanted_by(body))

    def most_open(self) -> int:
        """Returns the number of requests of one gRPC stream that may run at once."""
        return 256

    def message_reply(self, message: MessageRequest) -> HandlerReply:
        """Returns the reply to one message of a gRPC stream."""
        context = ReplyContext(self.name, self.version, request_index=message.index)
        return self._reply(self._read(message.payload, message.request_id), message.endpoint, context)

    def message_failure(self, request_id: str, index: int, error: Exception) -> Sequence[JsonObject]:
        """Returns the final response of a message that failed before it had a reply."""
        reply = PieceEncoder(ReplyContext(self.name, request_index=index), HandlerRequest(request_id, ()), False)
        return [reply.failure(error)]

    def open_prediction(
        self,
        fields: Sequence[BodyField],
        headers: Mapping[str, str],
        request_id: str,
        endpoint: EndpointKind,
        parameters: Mapping[str, Any] = MappingProxyType({}),
        whole_sequence: bool = False,
    ) -> PredictionReply:
        parts = [RequestPart(field.name, field.content_type, field.value) for field in fields]
        request = read_parts(parts, headers, request_id, self._slot.built.engine.config, parameters)
        if whole_sequence:
            is_open = not parameters.get("sequence_start")
            request = replace(request, whole_sequence=True, sequence_open=is_open)
        return PredictionReply(request, self._slot.built.engine.submit, self._observer(request, endpoint))

    def _read(self, payload: InferenceRequest, request_id: str) -> HandlerRequest:
        """Turns a V2 request into the handler's request. Raises InvalidInput or NotServing."""
        refuse_unreadable(payload)
        built = self._slot.built
        return read_request(payload, request_id, built.engine.config, built.archive.envelope)

    def _reply(
        self,
        request: HandlerRequest,
        endpoint: EndpointKind,
        context: ReplyContext,
        binary: BinaryOutputs | None = None,
    ) -> HandlerReply:
        """Makes the reply. ``binary`` names the outputs that a REST request wants as raw bytes; None means gRPC."""
        built = self._slot.built
        reply = PieceEncoder(context, request, built.archive.envelope in ("kserve", "kservev2"))
        return HandlerReply(request, reply, built.engine.submit, self._observer(request, endpoint), binary)

    def _observer(self, request: HandlerRequest, endpoint: EndpointKind) -> HandlerRequestObserver:
        record = RequestRecord(request.request_id, self.name, self.version or "", endpoint)
        return HandlerRequestObserver(record, self._reports, self._slot.built.engine.metrics)

    def describe_workers(self) -> dict[str, Any]:
        """Returns the model and its workers as TorchServe's management API shows them."""
        return describe_pool(self._slot.built)

    async def scale_workers(self, least: int, most: int, grace: float | None) -> None:
        """Sets the least and the largest number of workers, as ``WorkerScaling.scale`` does."""
        await self._slot.built.engine.scaling.scale(least, most, grace)

    def end_sequence(self, sequence_id: str) -> None:
        """Ends a sequence whose client sends no further request."""
        with suppress(NotServing):
            self._slot.built.engine.end_sequence(sequence_id)
