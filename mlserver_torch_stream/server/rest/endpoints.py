"""The REST doors of our models: one request in, one JSON answer or one stream of events out.

Knows nothing of which models are whose: it is entered for ours and for unknown ones only. MLServer's own counters and
CloudEvents headers come from its data plane, as for any model; its response cache is passed by, as a sampled answer is
never the same twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast
from uuid import uuid4

import orjson
from mlserver import ModelSettings
from mlserver.handlers import DataPlane
from mlserver.logging import logger
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver.utils import extract_headers, insert_headers
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput
from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.protocol.generate import as_flat_reply, as_v2_request, is_flat
from mlserver_torch_stream.protocol.v2_binary import BinaryOutputs, split_off, with_elements
from mlserver_torch_stream.protocol.v2_outputs import Body
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.protocol.v2_tensors import most_elements
from mlserver_torch_stream.server.cloud_events import as_headers
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.body import JSON_LENGTH, ClientLeft, parse_object, read_body, split_binary
from mlserver_torch_stream.server.rest.connection import abort, notice_lag_early, watched
from mlserver_torch_stream.server.rest.refusal import (
    EncodedHeaders,
    as_invalid_input,
    as_refusal,
    send_json,
    send_whole,
)
from mlserver_torch_stream.server.rest.sse import EventStream
from mlserver_torch_stream.server.streams.v2_answer import ModelName, V2Answer


class TokenModel(Protocol):
    """What a door asks of a model of ours."""

    name: str
    version: str | None
    settings: ModelSettings

    def generator(self, entrance: EndpointKind) -> Generator:
        """Raises NotServing."""


class EndpointReply(Protocol):
    """One request being answered: read once, as a stream of bodies or as a whole."""

    error: Exception | None  # that the client has been told after the answer had begun

    @property
    def request_id(self) -> str: ...

    @property
    def chat_tensors(self) -> bool: ...

    def bodies(self) -> AsyncIterator[Body]: ...

    async def whole_body(self, binary: Callable[[str], bool]) -> Body:
        """``binary``: the outputs, by name, whose elements are sent as they are, and not as JSON."""

    def failure_bodies(self, error: Exception) -> Sequence[Body]: ...

    def close(self) -> None:
        """Synchronous and idempotent."""


class AnswersItself(Protocol):
    """A model of ours that is no token model, and makes its answers itself."""

    def parse(self, raw: bytes, headers: Mapping[str, str], door: Endpoint) -> Any:
        """A body as ``open_answer`` takes it: a JSON object is a dict. Raises RequestError."""

    def open_answer(self, body: Any, headers: Mapping[str, str], door: Endpoint) -> EndpointReply:
        """The answer, not begun. Raises RequestError."""


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application behind one kind of route. ``flat``: the generate spelling is understood here too."""

    data_plane: DataPlane
    options: ServerOptions
    streaming: bool
    flat: bool

    @property
    def entrance(self) -> EndpointKind:
        return EndpointKind.REST_STREAM if self.streaming else EndpointKind.REST_UNARY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = _EndpointRequest(self, scope, receive, send)
        try:
            await visit.serve()
        except ClientLeft:
            pass
        except _AlreadyReported as told:
            logger.warning(f"A stream of model '{visit.name}' failed: {told.__cause__}")
        except asyncio.CancelledError:
            if not visit.left:
                raise
        except Exception as error:
            visit.notice(error)
            await as_refusal(error).send(send)


class _AlreadyReported(Exception):
    """The client has been told in its stream; raised so that MLServer counts a failure."""


class _EndpointRequest:
    """One request at a door."""

    def __init__(self, door: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.name: str = scope["path_params"]["model_name"]
        self.left = False
        self._model: TokenModel | None = None
        self._request_id = ""
        self._raw = b""  # of tensors, behind the request's JSON object
        self._opened = False
        self._version: str | None = scope["path_params"].get("model_version")
        self._door = door
        self._scope = scope
        self._receive = receive
        self._send = send

    async def serve(self) -> None:
        data_plane = self._door.data_plane
        # An unknown one is 404, and no metric bears its name.
        self._model = await data_plane._model_registry.get_model(self.name, self._version)
        whole = await read_body(self._scope, self._receive, self._door.options.max_body_bytes)
        headers = Headers(scope=self._scope)
        spelled, self._raw = split_binary(headers, whole)
        body = self._parse(spelled, headers)
        if isinstance(body, dict):
            self._request_id = str(body.get("id") or "")
        async with data_plane._infer_contextmanager(self.name, self._version) as model:
            await (self._stream if self._door.streaming else self._unary)(model, body)

    def notice(self, error: Exception) -> None:
        """What fails before there is an answer is noticed here; later its watch has noticed it."""
        if self._model is not None and not self._opened:
            watcher = ModelRequestObservers(self._model.name, self._model.version, self._door.entrance)
            watcher.refused(self._request_id, error)

    def _parse(self, raw: bytes, headers: Headers) -> Any:
        """A JSON object, or what else a model that makes its answers itself makes of it. Raises RequestError."""
        if hasattr(self._model, "open_answer") and JSON_LENGTH not in headers:
            return cast(AnswersItself, self._model).parse(raw, dict(headers), self._door)
        return parse_object(raw)

    async def _unary(self, model: TokenModel, body: Any) -> None:
        binary = BinaryOutputs.wanted_by(body)
        answer, flat = self._open(model, body)
        try:
            async with watched(self._receive, partial(self._leave, answer)):
                whole = await answer.whole_body(binary)
        finally:
            answer.close()
        headers = as_headers(self._cloud_events(model, whole["id"]))
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        if binary.asked:
            await _send_binary(self._send, *split_off(whole, binary), encoded)
        else:
            await send_json(self._send, 200, _speller(flat)(whole), encoded)

    async def _stream(self, model: TokenModel, body: Any) -> None:
        asked = BinaryOutputs.wanted_by(body).asked
        if asked:
            raise InvalidInput(asked, "a stream of events has no binary outputs; use an endpoint that answers once")
        answer, flat = self._open(model, body)
        try:
            notice_lag_early(self._scope)
            async with self._events(answer) as events, watched(self._receive, partial(self._leave, answer)):
                await self._send_all(answer, events, _first_with(self._cloud_events(model, answer.request_id), flat))
        finally:
            answer.close()
        if answer.error is not None:
            raise _AlreadyReported from answer.error

    def _open(self, model: TokenModel, body: Any) -> tuple[EndpointReply, bool]:
        """The answer, not begun, and whether it is spelled flat. Raises RequestError."""
        headers = dict(Headers(scope=self._scope))
        if hasattr(model, "open_answer"):
            if isinstance(body, dict):
                body = with_elements(body, self._raw, len(self._raw))  # a handler takes any number
            answer = cast(AnswersItself, model).open_answer(body, headers, self._door)
            self._opened = True
            return answer, False
        generator = model.generator(self._door.entrance)
        flat = self._door.flat and is_flat(body)
        body = with_elements(body, self._raw, most_elements(generator.info.max_model_len))
        try:
            payload = as_v2_request(body) if flat else InferenceRequest.model_validate(body)
        except ValidationError as error:
            raise as_invalid_input(error) from None
        insert_headers(payload, headers)
        request_id = payload.id or str(uuid4())
        request = decode_request(payload, generator.info, streaming=self._door.streaming, request_id=request_id)
        self._opened = True
        start = partial(generator.start, request)
        return V2Answer(request, ModelName(model.name, model.version), start, request_index=None), flat

    def _events(self, answer: EndpointReply) -> EventStream:
        options = self._door.options
        return EventStream(
            self._send,
            keep_alive=0.0 if answer.chat_tensors else options.sse_ping_interval,
            stalled_after=options.stalled_reader_timeout,
            stalled=partial(self._stalled, answer),
        )

    async def _send_all(self, answer: EndpointReply, events: EventStream, spell: Callable[[Body], bytes]) -> None:
        """Raises what goes wrong as long as nothing has been sent; later the stream says it."""
        try:
            async for body in answer.bodies():
                await events.send(spell(body))
        except Exception as error:
            if not events.started:
                raise
            answer.error = GenerationFailed(as_refusal(error).message)
            for body in answer.failure_bodies(answer.error):
                await events.send(spell(body))
        await events.end()

    def _leave(self, answer: EndpointReply) -> None:
        self.left = True
        answer.close()

    def _stalled(self, answer: EndpointReply) -> None:
        seconds = self._door.options.stalled_reader_timeout
        logger.warning(f"A client of model '{self.name}' has read nothing for {seconds:g} s: its stream is cut")
        self._leave(answer)
        abort(self._scope)

    def _cloud_events(self, model: TokenModel, request_id: str) -> dict[str, str]:
        response = InferenceResponse(model_name=model.name, id=request_id, outputs=[])
        self._door.data_plane._inference_middleware.response_middleware(response, model.settings)
        return extract_headers(response) or {}


async def _send_binary(send: Send, body: Body, raw: bytes, headers: EncodedHeaders) -> None:
    """The JSON object and, behind it, the elements of its binary outputs."""
    spelled = orjson.dumps(body)
    length = (JSON_LENGTH.encode(), str(len(spelled)).encode())
    await send_whole(send, 200, spelled + raw, [(b"content-type", b"application/octet-stream"), length, *headers])


def _speller(flat: bool) -> Callable[[Body], bytes]:
    return (lambda body: orjson.dumps(as_flat_reply(body))) if flat else orjson.dumps


def _first_with(headers: Mapping[str, str], flat: bool) -> Callable[[Body], bytes]:
    """Spells the bodies of a stream, the first of them with CloudEvents headers; flat replies have no place for any."""
    if flat:
        return _speller(flat)
    pending = dict(headers)

    def spell(body: Body) -> bytes:
        if pending:
            body["parameters"]["headers"] = dict(pending)
            pending.clear()
        return orjson.dumps(body)

    return spell
