"""The MLServer runtime for TorchServe handlers: ``implementation: mlserver_torch_stream.TorchServeRuntime``.

Knows nothing of workers or pieces. MLServer may reload this module at any time, so it holds no state. The server's
doors, its drain and its errors are those of our token models: this room knows ``server`` for that alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver.utils import insert_headers
from pydantic import ValidationError

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.server.lifecycle.base_runtime import BaseRuntime
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.observability.request_log import join_mlservers_log
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.rest.body import parse_object
from mlserver_torch_stream.server.rest.endpoints import Endpoint
from mlserver_torch_stream.server.rest.refusal import as_invalid_input
from mlserver_torch_stream.server.status import as_server_error
from mlserver_torch_stream.torchserve.handler_metrics import HANDLER_METRICS
from mlserver_torch_stream.torchserve.handler_request import HandlerRequest, RequestPart
from mlserver_torch_stream.torchserve.runtime.build import BuiltPool, build, envelope_of
from mlserver_torch_stream.torchserve.runtime.handler_observer import HandlerRequestObserver
from mlserver_torch_stream.torchserve.runtime.handler_reply import HandlerReply
from mlserver_torch_stream.torchserve.runtime.handler_session import HandlerSession
from mlserver_torch_stream.torchserve.runtime.posted_body import read_posted
from mlserver_torch_stream.torchserve.v2_input import is_v2, read_body, read_request
from mlserver_torch_stream.torchserve.v2_output import Reply


class TorchServeRuntime(BaseRuntime):
    """Serves a TorchServe archive or handler, unchanged, in worker processes of its own."""

    _slot: ModelSlot[BuiltPool]

    async def load(self) -> bool:
        join_mlservers_log()
        loop = asyncio.get_running_loop()
        with self._loading():
            built = await self._slot.load(lambda _: build(self.settings, loop))
        logger.info(f"Model '{self.name}': {built.summary}")
        return True

    async def unload(self) -> bool:
        await self._slot.unload()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        answer: HandlerReply | None = None
        try:
            answer = self._open(payload, payload.id or str(uuid4()), None, EndpointKind.GRPC_UNARY)
            return await answer.whole()
        except RequestError as error:
            raise as_server_error(error, streaming=False) from None
        finally:
            if answer is not None:
                answer.close()

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        session: HandlerSession | None = None
        try:
            opened = partial(self._open, entrance=EndpointKind.GRPC_STREAM)
            session = HandlerSession(self.name, opened, payloads, self.inflight, read_options().stalled_reader_timeout)
            async for response in await session.open():
                yield response
        except RequestError as error:
            raise as_server_error(error, streaming=True) from None
        finally:
            # Synchronous: this may run in a task that cannot wait, when the client has left.
            if session is not None:
                session.close()

    def parse(self, raw: bytes, headers: Mapping[str, str], door: Endpoint) -> dict[str, Any] | RequestPart:
        """For the REST doors: behind ``generate`` a body may be anything that TorchServe would give the handler."""
        return read_posted(raw, headers.get("content-type", "")) if door.flat else parse_object(raw)

    def open_answer(
        self, body: dict[str, Any] | RequestPart, headers: Mapping[str, str], door: Endpoint
    ) -> HandlerReply:
        """For the REST doors: a V2 request, or behind ``generate`` the handler's own body."""
        request_id = str((body.get("id") if isinstance(body, dict) else None) or uuid4())
        if isinstance(body, RequestPart) or (door.flat and not is_v2(body)):
            request = read_body(body, headers, request_id, self._slot.built.engine.config)
            return self._answer(request, None, door.entrance)
        try:
            payload = InferenceRequest.model_validate(body)
        except ValidationError as error:
            raise as_invalid_input(error) from None
        insert_headers(payload, dict(headers))
        return self._answer(self._read(payload, request_id), None, door.entrance)

    def _open(
        self, payload: InferenceRequest, request_id: str, request_index: int | None, entrance: EndpointKind
    ) -> HandlerReply:
        """Raises RequestError, which nobody else notices on gRPC."""
        try:
            request = self._read(payload, request_id)
        except RequestError as error:
            ModelRequestObservers(self.name, self.version, entrance).refused(request_id, error)
            raise
        return self._answer(request, request_index, entrance)

    def _read(self, payload: InferenceRequest, request_id: str) -> HandlerRequest:
        built = self._slot.built
        unreadable = getattr(payload, "_error", None)
        if isinstance(unreadable, InvalidInput):  # a gRPC message that could not be converted
            raise unreadable
        return read_request(payload, request_id, built.engine.config, envelope_of(built.archive))

    def _answer(self, request: HandlerRequest, request_index: int | None, entrance: EndpointKind) -> HandlerReply:
        built = self._slot.built
        speaks_v2 = envelope_of(built.archive) == "kservev2"
        reply = Reply(self.name, self.version, request, speaks_v2, request_index)
        figures = HANDLER_METRICS.of(self.name, self.version)
        watch = HandlerRequestObserver(request.request_id, self.name, self.version, entrance, figures)
        return HandlerReply(request, reply, built.engine.submit, watch)
