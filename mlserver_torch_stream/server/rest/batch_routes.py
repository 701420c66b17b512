"""The routes of OpenAI's files and batches; an uploaded file is stored as it arrives.

Every error has OpenAI's error object. A file that is too large is refused as soon as this is known, and the remaining
bytes are not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from uuid import uuid4

import orjson
from mlserver.logging import logger
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.cloud.batches.batch_store import FileStore, translating_store_errors
from mlserver_torch_stream.errors import InvalidInput, QueueFull, RequestError
from mlserver_torch_stream.protocol.bodies import read
from mlserver_torch_stream.protocol.openai_batch_models import PURPOSE, BatchQuery, BatchRequest, FileQuery
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.protocol.values import refuse, shown
from mlserver_torch_stream.server.batches import Batches
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import as_refusal
from mlserver_torch_stream.server.rest.connection import (
    ClientLeft,
    UnknownCoding,
    WatchedConnection,
    abort,
    as_length,
    notice_lag_early,
    parse_object,
    read_body,
)
from mlserver_torch_stream.server.rest.forms import FormEvent, FormReader, PartBegan, PartEnded
from mlserver_torch_stream.server.rest.sse import ChunkStream

_AROUND = 64 * 1024  # bytes that a form may have besides its file
_MAX_NAME = 255  # characters
_MAX_PURPOSE = 64  # bytes
_MAX_UPLOADS = 8  # uploads at the same time; each holds up to two parts of 5 MiB in memory
_CONTENT_TYPE = "application/octet-stream"


class UploadStalled(RequestError):
    """The client has not sent any bytes of its file for too long.

    Without this limit, a few dead connections would occupy all upload slots forever.
    """

    status = 408


class FileTooLarge(RequestError):
    """A file is larger than the settings allow."""

    status = 413


async def receive_file(request: Request, files: FileStore, max_bytes: int, timeout: float) -> JsonObject:
    """Stores an uploaded file, and returns OpenAI's object for it.

    ``timeout`` bounds the seconds between two pieces of the file; 0 means no limit. Raises RequestError or ClientLeft.
    """
    too_large = FileTooLarge(f"file: larger than {max_bytes} bytes")
    _refuse_declared(request, max_bytes, too_large)
    form = FormReader(request.headers.get("content-type", ""))
    parts: dict[str, PartBegan] = {}
    purpose, upload = b"", None
    async for event in _events(request, form, max_bytes, timeout, too_large):
        if isinstance(event, PartBegan):
            _check_part(event, parts)
            parts[event.name] = part = event
            if part.name == "file":
                upload = files.begin()
        elif part.name == "file":
            if upload is not None and not isinstance(event, PartEnded):
                if upload.size + len(event.data) > max_bytes:
                    raise too_large
                await upload.write(event.data)
        elif isinstance(event, PartEnded):
            _check_purpose(purpose)
        else:
            purpose = (purpose + event.data)[: _MAX_PURPOSE + 1]
    if not form.complete:
        raise InvalidInput("body", "ends before the last boundary of its form")
    if "purpose" not in parts:
        raise InvalidInput("purpose", "is missing")
    if upload is None or not upload.size:
        raise InvalidInput("file", "is missing" if upload is None else "is empty")
    return await upload.end(parts["file"].filename or "")


async def _events(
    request: Request, form: FormReader, max_bytes: int, timeout: float, too_large: FileTooLarge
) -> AsyncIterator[FormEvent]:
    received, more = 0, True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), timeout or None)
        except asyncio.TimeoutError:
            raise UploadStalled(f"file: no data has arrived for {timeout:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece, more = message.get("body", b""), message.get("more_body", False)
        received += len(piece)
        if received > max_bytes + _AROUND:
            raise too_large
        for event in form.feed(piece):
            yield event


def _refuse_declared(request: Request, max_bytes: int, too_large: FileTooLarge) -> None:
    """Raises an error if the headers show that the body cannot be accepted, before a client that waits for ``100
    Continue`` sends the body.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnknownCoding(f"content-encoding: {coding[:100]!r} is not implemented for files")
    declared = as_length(request.headers.get("content-length", ""))
    if declared is not None and declared > max_bytes + _AROUND:
        raise too_large


def _check_part(part: PartBegan, earlier: Mapping[str, PartBegan]) -> None:
    if part.name.startswith("expires_after"):
        raise InvalidInput("expires_after", "is not implemented: a file stays until it is deleted")
    if part.name not in ("purpose", "file"):
        refuse(part.name, ..., ("purpose", "file"), what="field of the form")
    if part.name in earlier:
        raise InvalidInput(part.name, "is given twice")
    if part.name == "file" and not 0 < len(part.filename or "") <= _MAX_NAME:
        raise InvalidInput("file", f"must have a file name of at most {_MAX_NAME} characters")


def _check_purpose(raw: bytes) -> None:
    purpose = raw.decode("utf-8", "replace")
    if purpose != PURPOSE:
        raise InvalidInput("purpose", f"must be {PURPOSE}, got {shown(purpose)}")


Handler = Callable[[Request], Awaitable[Response]]


def add_batch_routes(host: ServerHost, batches: Batches, options: ServerOptions) -> None:
    """Adds OpenAI's paths of files and batches."""
    endpoints = _BatchEndpoints(batches, options)
    table: Mapping[str, Mapping[str, Handler]] = {
        "/files": {"POST": endpoints.create_file, "GET": endpoints.list_files},
        "/files/{file_id}": {"GET": endpoints.get_file, "DELETE": endpoints.delete_file},
        "/files/{file_id}/content": {"GET": endpoints.file_content},
        "/batches": {"POST": endpoints.create_batch, "GET": endpoints.list_batches},
        "/batches/{batch_id}": {"GET": endpoints.get_batch},
        "/batches/{batch_id}/cancel": {"POST": endpoints.cancel_batch},
    }
    routes = [
        Route(prefix + path, _answered(handlers), methods=list(handlers), name=f"torch_stream:{prefix}{path}")
        for prefix in OPENAI_PREFIXES
        for path, handlers in table.items()
    ]
    host.add_routes(routes)


def _answered(handlers: Mapping[str, Handler]) -> Handler:
    """Returns a handler that calls the one for the request's method, and turns errors into responses.

    After an error the connection of a POST is closed, because its body may not have been read to the end.
    """

    async def answer(request: Request) -> Response:
        try:
            with translating_store_errors():
                response = await handlers["GET" if request.method == "HEAD" else request.method](request)
        except ClientLeft:
            response = Response(status_code=400)  # not sent, because the client has disconnected
        except Exception as error:
            refusal = as_refusal(error)
            status, body = OPENAI_CHAT.refusal(refusal)
            headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
            if request.method == "POST":
                headers["connection"] = "close"
            response = JSONResponse(body, status, headers)
        request_id = OPENAI_CHAT.request_id({}, request.headers) or str(uuid4())
        response.headers.update(OPENAI_CHAT.headers(request_id))
        return response

    return answer


class _BatchEndpoints:
    """The handlers of the routes. They raise RequestError and the errors of the store."""

    def __init__(self, batches: Batches, options: ServerOptions) -> None:
        self._batches = batches
        self._options = options
        self._uploads = 0

    @property
    def _files(self) -> FileStore:
        return self._batches.runner.places.files

    async def create_file(self, request: Request) -> Response:
        files = self._files
        if self._uploads >= _MAX_UPLOADS:
            raise QueueFull(f"{self._uploads} files are being uploaded already; at most {_MAX_UPLOADS} at a time")
        self._uploads += 1
        try:
            options = self._options
            return _json(await receive_file(request, files, options.batch_max_file_bytes, options.piece_timeout))
        finally:
            self._uploads -= 1

    async def list_files(self, request: Request) -> Response:
        files = self._files
        return _json(await files.page(**read(request.query_params, FileQuery).model_dump()))

    async def get_file(self, request: Request) -> Response:
        return _json(await self._files.get(request.path_params["file_id"]))

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        reader = await self._batches.runner.reader(file_id)
        if reader is not None:
            raise InvalidInput("file_id", f"is the input of {reader}, which has not ended")
        return _json(await self._files.delete(file_id))

    async def file_content(self, request: Request) -> Response:
        file = await self._files.get(request.path_params["file_id"])
        if request.method == "HEAD":
            return Response(headers={"content-length": str(file["bytes"])}, media_type=_CONTENT_TYPE)
        pieces = self._files.content(file)
        return _Download(file["bytes"], await anext(pieces, b""), pieces, self._options.stalled_reader_timeout)

    async def create_batch(self, request: Request) -> Response:
        runner = self._batches.runner
        body = parse_object(await read_body(request.scope, request.receive, self._options.max_body_bytes))
        return _json((await runner.create(read(body, BatchRequest))).shown())

    async def list_batches(self, request: Request) -> Response:
        batches = self._batches.runner.places.batches
        return _json(await batches.page(**read(request.query_params, BatchQuery).model_dump()))

    async def get_batch(self, request: Request) -> Response:
        return _json((await self._batches.runner.places.batches.get(request.path_params["batch_id"])).shown())

    async def cancel_batch(self, request: Request) -> Response:
        return _json((await self._batches.runner.cancel(request.path_params["batch_id"])).shown())


def _json(body: JsonObject) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


class _Download(Response):
    """Sends a file in pieces. The first piece is read beforehand, so that an error can still set the status.

    A client that reads nothing for ``stalled_after`` seconds is disconnected.
    """

    def __init__(self, size: int, first: bytes, rest: AsyncGenerator[bytes, None], stalled_after: float) -> None:
        super().__init__(headers={"content-length": str(size)}, media_type=_CONTENT_TYPE)
        self._first = first
        self._rest = rest
        self._stalled_after = stalled_after
        self._left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notice_lag_early(scope)
        stalled = partial(self._stalled, scope)
        chunks = ChunkStream(send, stalled_after=self._stalled_after, stalled=stalled, headers=self.raw_headers)
        async with aclosing(self._rest), WatchedConnection(scope, receive, self._leave), chunks:
            try:
                piece: bytes | None = self._first
                while piece is not None and not self._left:
                    await chunks.write(piece)
                    with translating_store_errors():
                        piece = await anext(self._rest, None)
                await chunks.write(b"", more=False)
            except RequestError as error:
                logger.error(f"Cannot send the rest of a file's content: {error.message}")
                abort(scope)

    def _leave(self) -> None:
        self._left = True

    def _stalled(self, scope: Scope) -> None:
        logger.warning(f"A client has read nothing of a file for {self._stalled_after:g} s: its download is closed")
        self._leave()
        abort(scope)
