"""Answers the batches of ``cloud run``. One HTTP exchange, ``POST /v2/models/{model}/batch``, serves the whole run.

The request and the response are streams of frames, each a JSON header and bytes. A batch is a frame with ``batch``, the
batch's number, and ``items``, the number of its items, followed by one frame for each item. The answer to a batch has
the same form, in the order of the items, and is sent when all items are answered. The items of a token model are bodies
of OpenAI's API, which are generated independently; the items of a handler are one batch of the handler. An item that
belongs to a sequence is a separate batch, and its field ``sequence`` has V2's parameters of the sequence. A frame with
``cancel`` ends a batch, and one with ``end_sequence`` a sequence of which no further item comes. While batches are
being answered, an answer without items says at intervals that the server is alive. An invalid body is answered with
400; after the first batch, the connection is closed instead. ``GET`` describes the model's workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import orjson
from mlserver.logging import logger
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.handlers.frames import DROPPED, BrokenFrame, FrameBuffer, encode_frame
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT, OPENAI_SPELLINGS, OpenAISpelling
from mlserver_torch_stream.protocol.spelling import PostedBody, ReplyContext
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.host import ServerHost, find_model
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import (
    HandlerModel,
    PieceReply,
    Request,
    RestRequest,
    ServedModel,
    as_refusal,
    find_accepted,
    is_ours,
)
from mlserver_torch_stream.server.rest.connection import (
    BodyTooLarge,
    ClientLeft,
    WatchedConnection,
    abort,
    letting_pause,
    parse_object,
    send_json,
    send_refusal,
)
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute
from mlserver_torch_stream.server.rest.prediction_messages import BodyField
from mlserver_torch_stream.server.token_model import TokenModel

PATH = "/v2/models/{model_name}/batch"
MAX_ANSWER_BYTES = 64 * 2**20  # bytes of one item's answer
MAX_ANSWER_PIECES = 1 << 18  # pieces of one item's answer, each of which takes some 500 further bytes of memory
_MAX_MESSAGE_BYTES = 2000
_UNBOUNDED = 1 << 30
_FRAMES = [(b"content-type", b"application/octet-stream")]
_ALIVE = encode_frame({"batch": -1, "items": 0})

Item = tuple[dict[str, Any], bytes]


def add_routes(host: ServerHost, lifecycle: Lifecycle, options: ServerOptions) -> None:
    """Adds the route of the batches. Called once for a server."""
    host.add_routes([_BatchRoute(host, _BatchEndpoint(host, lifecycle, options))])


class _BatchRoute(SelectiveRoute):
    def __init__(self, host: ServerHost, endpoint: _BatchEndpoint) -> None:
        super().__init__(PATH, endpoint, ["GET", "POST"])
        self._registry = host.registry

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        model = find_model(self._registry, path["model_name"], None)
        return model is None or is_ours(model)


class _BatchEndpoint:
    """The ASGI application of the path."""

    def __init__(self, host: ServerHost, lifecycle: Lifecycle, options: ServerOptions) -> None:
        self._host = host
        self._lifecycle = lifecycle
        self._max_body_bytes = options.max_body_bytes
        self._ping_interval = options.sse_ping_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ClientLeft:
            pass
        except Exception as error:
            refused = as_refusal(error, self._lifecycle.shutdown_reason)
            status, body = OPENAI_CHAT.refusal(refused)
            await send_refusal(send, status, orjson.dumps(body), refused.retry_after, [])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model_name"]
        found: ServedModel = find_accepted(self._host.registry, name, None, is_ours)
        described = found.describe_workers()
        if scope["method"] == "GET":
            await send_json(send, 200, orjson.dumps(described), [])
            return
        batches = _batches(receive, self._max_body_bytes)
        first = await anext(batches, None)
        await send({"type": "http.response.start", "status": 200, "headers": _FRAMES})
        # While all workers are busy, one batch waits in the handler's queue, so that a worker begins it as soon as it
        # has ended its own. Further batches wait here, because in the queue they would be split and joined: a batch of
        # the run is to become one batch of the handler. A batch of one item cannot be split. The items of sequences
        # come one by one, and the handler's queue gathers the items of several sequences.
        gathered = described["stateful"] if isinstance(found, HandlerModel) else True
        waits = not gathered and described["batchSize"] > 1
        turns = asyncio.Semaphore(max(1, described["maxWorkers"]) + 1 if waits else _UNBOUNDED)
        tasks: dict[int, asyncio.Task[None]] = {}

        async def answer(number: int, items: list[Item]) -> None:
            with letting_pause(scope):
                await self._answer(found, number, items, turns, send)

        def take(number: int | str, items: list[Item] | None) -> None:
            if isinstance(number, str):
                model = find_model(self._host.registry, name, None)  # has the sequence, also after a reload
                if isinstance(model, HandlerModel):
                    model.end_sequence(number)
            elif items is not None:
                if number in tasks:
                    raise InvalidInput("batch", f"{number} is already being answered")
                tasks[number] = asyncio.create_task(answer(number, items))
                tasks[number].add_done_callback(lambda _: tasks.pop(number))
            elif number in tasks:
                tasks[number].cancel()

        def end() -> None:
            for task in list(tasks.values()):
                task.cancel()

        pinging = asyncio.create_task(self._ping(tasks, send))
        try:
            if first is not None:
                take(*first)
            async for number, items in batches:
                take(number, items)
            async with WatchedConnection(scope, receive, end):
                if tasks:
                    await asyncio.wait(tasks.values())
            pinging.cancel()
            await send({"type": "http.response.body", "body": b""})
        except InvalidInput as error:
            logger.warning(f"The connection that sends batches to model '{found.name}' is closed: {error.message}")
            abort(scope)
        finally:
            pinging.cancel()
            end()

    async def _ping(self, tasks: Collection[object], send: Send) -> None:
        """Tells the client at intervals that the server is alive, while there are ``tasks``."""
        while self._ping_interval:
            await asyncio.sleep(self._ping_interval)
            if tasks:
                await send({"type": "http.response.body", "body": _ALIVE, "more_body": True})

    async def _answer(
        self, found: ServedModel, number: int, items: Sequence[Item], turns: asyncio.Semaphore, send: Send
    ) -> None:
        request: Request[PieceReply] = Request(self._lifecycle, EndpointKind.REST_UNARY, model=found)
        try:
            async with turns, request.entered(self._host) as model:
                answers = await self._answers(model, items)
        except Exception as error:  # the model cannot answer any of the items now
            refused = request.refuse(error)
            status, body = OPENAI_CHAT.refusal(refused)
            shared = refused.shared or len(items) > 1
            refusal = {"status": status, "busy": refused.retry_after is not None, "shared": shared}
            answers = [encode_frame(refusal, orjson.dumps(body))] * len(items)
        head = encode_frame({"batch": number, "items": len(items)})
        await send({"type": "http.response.body", "body": b"".join((head, *answers)), "more_body": True})

    async def _answers(self, model: ServedModel, items: Sequence[Item]) -> list[bytes]:
        """Returns a frame for each item. Raises RequestError if the model cannot answer any of them now."""
        fitting = [item for item in items if DROPPED not in item[0]]
        answers = iter(await self._fitting_answers(model, fitting))
        error = BodyTooLarge(f"body: larger than {self._max_body_bytes} bytes")
        return [self._refusal(model, OPENAI_CHAT, error) if DROPPED in header else next(answers) for header, _ in items]

    async def _fitting_answers(self, model: ServedModel, items: Sequence[Item]) -> list[bytes]:
        if isinstance(model, TokenModel):
            return await _gather([self._completion(model, header, body) for header, body in items])
        assert isinstance(model, HandlerModel)
        replies = [_opened(model, header, body) for header, body in items]
        try:
            for index, reply in enumerate(replies):
                reply.begin(more=index < len(replies) - 1)
            return await _gather([self._prediction(model, reply) for reply in replies])
        finally:
            for reply in replies:  # a reply that is not read would block its worker
                reply.close()

    async def _completion(self, model: TokenModel, header: Mapping[str, Any], body: bytes) -> bytes:
        """Answers an item of a token model. If its header has ``count``, only the prompt's tokens are counted."""
        path = _field(header, "path", str)
        spelling = OPENAI_SPELLINGS.get(path)
        if spelling is None:
            raise InvalidInput("path", f"must be one of {', '.join(OPENAI_SPELLINGS)}")
        try:
            posted = PostedBody(parse_object(body))
            if header.get("count"):
                return encode_frame({"status": 200, "tokens": _count(model, spelling, posted)})
            route = RestRoute(path, False, (spelling,))
            context = partial(_context, model)
            kind = EndpointKind.REST_UNARY
            with closing(model.reply(RestRequest(posted, route, spelling, kind, "item", context))) as reply:
                whole, _ = await reply.attached()
            return encode_frame({"status": 200}, orjson.dumps(whole))
        except Exception as error:
            return self._refusal(model, spelling, error)

    async def _prediction(self, model: HandlerModel, reply: PieceReply) -> bytes:
        values: list[bytes] = []
        size, content_type = 0, ""
        try:
            async for piece in reply.pieces():
                if piece.status >= 400:
                    raise _StatusSet(piece.status, piece.value)
                content_type = content_type if values else piece.content_type
                values.append(piece.value)
                size += len(piece.value)
                if size > MAX_ANSWER_BYTES:
                    return encode_frame({"too_large": f"the answer is larger than {MAX_ANSWER_BYTES} bytes"})
                if len(values) > MAX_ANSWER_PIECES:
                    return encode_frame({"too_large": f"the answer has more than {MAX_ANSWER_PIECES} pieces"})
        except Exception as error:
            return self._refusal(model, OPENAI_CHAT, error)
        finally:
            reply.close()
        head = {"status": 200, "content_type": content_type, "lengths": [len(value) for value in values]}
        return encode_frame(head, b"".join(values))

    def _refusal(self, model: ServedModel, spelling: OpenAISpelling, error: Exception) -> bytes:
        """Returns the frame of an error. With ``busy`` the item may be sent again later.

        Items of a model that has died are always ``busy``, so that no item fails because of the model.
        """
        refused = as_refusal(error, self._lifecycle.shutdown_reason)
        status, body = spelling.refusal(refused)
        dead = status >= 500 and model.trouble is not None
        head = {"status": status, "busy": dead or refused.retry_after is not None, "shared": refused.shared}
        return encode_frame(head, orjson.dumps(body))


class _StatusSet(RequestError):
    """The handler has set an error status for its response."""

    def __init__(self, status: int, value: bytes) -> None:
        super().__init__(value[:_MAX_MESSAGE_BYTES].decode(errors="replace").strip())
        self.status = status


async def _gather(answers: Sequence[Any]) -> list[bytes]:
    """Awaits all answers concurrently; if one raises, or the caller is cancelled, all are cancelled."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _opened(model: HandlerModel, header: Mapping[str, Any], body: bytes) -> PieceReply:
    headers = {name: str(text) for name, text in _field(header, "headers", dict).items()}
    field = BodyField("body", _field(header, "content_type", str), body)
    sequence = _field(header, "sequence", dict) if header.get("sequence") else {}
    request_id, kind = _field(header, "id", str), EndpointKind.REST_STREAM
    return model.open_prediction([field], headers, request_id, kind, sequence, whole_sequence=bool(sequence))


def _field(header: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns a field of a frame's header. Raises InvalidInput if the field does not have the type ``kind``."""
    if type(header.get(name)) is not kind:
        raise InvalidInput(name, f"must be of type {kind.__name__} in the header of a frame")
    return header[name]


def _count(model: TokenModel, spelling: OpenAISpelling, posted: PostedBody) -> int:
    generator = model.generator(EndpointKind.REST_UNARY)
    request = spelling.decode(posted, generator.info, streaming=False, request_id="item")
    return sum(len(generator.codec.encode(prompt)) for prompt in request.prompts)


def _context(model: ServedModel, request_id: str) -> ReplyContext:
    return ReplyContext(model.name, model.version, 0)


async def _batches(receive: Receive, max_bytes: int) -> AsyncIterator[tuple[int | str, list[Item] | None]]:
    """Yields the number and the items of each batch. If the items are None, the batch is to be cancelled. A text is the
    id of a sequence that ends.

    The body of an item that is larger than ``max_bytes`` is dropped. Raises ClientLeft or InvalidInput.
    """
    buffer = FrameBuffer(max_bytes=max_bytes, drops=True)
    batch: tuple[int, list[Item]] | None = None
    count, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        buffer.feed(message.get("body", b""))
        more = message.get("more_body", False)
        while (frame := _taken(buffer)) is not None:
            header, _ = frame
            if batch is None and "cancel" in header:
                yield _field(header, "cancel", int), None
            elif batch is None and "end_sequence" in header:
                yield _field(header, "end_sequence", str), None
            elif batch is None:
                batch, count = (_field(header, "batch", int), []), _field(header, "items", int)
                if count < 1:
                    raise InvalidInput("items", "must be at least 1")
            else:
                batch[1].append(frame)
                if len(batch[1]) == count:
                    yield batch
                    batch = None


def _taken(buffer: FrameBuffer) -> Item | None:
    try:
        return buffer.take()
    except (BrokenFrame, RecursionError) as error:
        raise InvalidInput("body", f"is not valid: {error}") from None
