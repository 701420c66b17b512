"""The MLServer runtime for TorchServe handlers: ``implementation: mlserver_torch_stream.TorchServeRuntime``.

MLServer may reload this module at any time, so it holds no state. This package imports ``server`` because endpoints,
drain and errors are those of our token models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from mlserver.logging import logger

from mlserver_torch_stream.handlers.config.model_config import KEYS, OURS
from mlserver_torch_stream.handlers.pool.handler_metrics import HANDLER_METRICS
from mlserver_torch_stream.handlers.pool.handler_request import RequestPart
from mlserver_torch_stream.handlers.runtime.build import BuiltPool, build, describe_pool
from mlserver_torch_stream.handlers.runtime.reply import HandlerOpener, HandlerReply, PredictionReply, read_posted
from mlserver_torch_stream.handlers.runtime.v2_messages import read_body, read_parts
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.protocol.v2_reply import read_posted_request
from mlserver_torch_stream.protocol.v2_tensors import BinaryOutputs, has_tensors, refuse_left_over
from mlserver_torch_stream.server.base_runtime import BaseRuntime
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.observability.request_log import EndpointKind, join_mlservers_log
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.rest.body import parse_object
from mlserver_torch_stream.server.rest.prediction_messages import BodyField
from mlserver_torch_stream.server.served_model import HandlerModel, RestRequest


class TorchServeRuntime(BaseRuntime, HandlerModel):
    """Serves a TorchServe archive or handler, unchanged, in worker processes of its own."""

    _slot: ModelSlot[BuiltPool]
    extra_keys = (*KEYS, *OURS)

    async def load(self) -> bool:
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
        await self._slot.unload()
        return True

    def parse(self, raw: bytes, content_type: str, route: RestRoute) -> dict[str, Any] | RequestPart:
        """Where flat JSON is taken, a body may be anything that TorchServe takes."""
        return read_posted(raw, content_type) if FLAT in route.spellings else parse_object(raw)

    def reply(self, request: RestRequest) -> HandlerReply:
        """A V2 request or, where flat JSON is taken, the handler's own body."""
        posted = request.posted
        body = posted.json
        own = isinstance(body, RequestPart) or (FLAT in request.route.spellings and not has_tensors(body))
        request_id = str((body.get("id") if isinstance(body, dict) else None) or uuid4())
        opener = self.opener(request.endpoint)
        if own:
            refuse_left_over(len(posted.raw))
            handled = read_body(body, posted.headers, request_id, self._slot.built.engine.config)
        else:
            payload = read_posted_request(posted, len(posted.raw), streaming=request.streaming)
            handled = opener.read(payload, request_id)
        return opener.reply(handled, request.context(request_id), BinaryOutputs.wanted_by(body))

    def open_prediction(
        self,
        fields: Sequence[BodyField],
        headers: Mapping[str, str],
        request_id: str,
        endpoint: EndpointKind,
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> PredictionReply:
        opener = self.opener(endpoint)
        parts = [RequestPart(field.name, field.content_type, field.value) for field in fields]
        request = read_parts(parts, headers, request_id, self._slot.built.engine.config, parameters)
        return opener.prediction(request)

    def describe_workers(self) -> dict[str, Any]:
        return describe_pool(self._slot.built)

    async def scale_workers(self, least: int, most: int, grace: float | None) -> None:
        await self._slot.built.engine.scaling.scale(least, most, grace)

    def opener(self, endpoint: EndpointKind) -> HandlerOpener:
        return HandlerOpener(self.name, self.version, self._slot.built, endpoint, self._state.reports)
