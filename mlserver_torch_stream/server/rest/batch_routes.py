"""The routes of OpenAI's files and batches; an uploaded file is stored as it arrives.

Every error has OpenAI's error object. A file over the bound is refused as soon as that is known, and its rest is not
read.
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

from mlserver_torch_stream.batches.batch_record import BATCH, FILE, read_batch_request
from mlserver_torch_stream.batches.file_store import PURPOSE, FileStore, FileUpload
from mlserver_torch_stream.batches.pages import FileTooLarge, read_query
from mlserver_torch_stream.errors import InvalidInput, QueueFull, RequestError
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.protocol.values import refuse, shown
from mlserver_torch_stream.server.batches.service import BatchService
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import as_refusal
from mlserver_torch_stream.server.rest.connection import (
    ClientLeft,
    UnknownCoding,
    abort,
    as_length,
    notice_lag_early,
    parse_object,
    read_body,
    watched,
)
from mlserver_torch_stream.server.rest.forms import FormEvent, FormReader, PartBegan, PartPiece
from mlserver_torch_stream.server.rest.sse import ChunkStream

_AROUND = 64 * 1024  # bytes of a form beside its file
_MAX_NAME = 255  # characters
_MAX_PURPOSE = 64  # bytes


class UploadStalled(RequestError):
    """The client has sent nothing of its file for too long.

    Without a bound, some dead connections would take every place of an upload for ever.
    """

    status = 408


async def receive_file(request: Request, files: FileStore, most_bytes: int, timeout: float) -> JsonObject:
    """The object of the new file. ``timeout``: seconds between two pieces of it, 0 for ever. Raises RequestError or
    ClientLeft."""
    _refuse_declared(request, most_bytes)
    form = FormReader(request.headers.get("content-type", ""))
    parts = _FileForm(files, most_bytes)
    received = 0
    try:
        async for chunk in _chunks(request, timeout):
            received += len(chunk)
            if received > most_bytes + _AROUND:
                raise _too_large(most_bytes)
            for event in form.feed(chunk):
                await parts.take(event)
        if not form.complete:
            raise InvalidInput("body", "ends before the last boundary of its form")
        return await parts.end()
    except BaseException:
        await parts.discard()
        raise


async def _chunks(request: Request, timeout: float) -> AsyncIterator[bytes]:
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), timeout or None)
        except asyncio.TimeoutError:
            raise UploadStalled(f"file: no data has arrived for {timeout:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _refuse_declared(request: Request, most_bytes: int) -> None:
    """Before anything is read, so that a client that waits for ``100 Continue`` sends nothing."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnknownCoding(f"content-encoding: {coding[:100]!r} is not implemented for files")
    declared = as_length(request.headers.get("content-length", ""))
    if declared is not None and declared > most_bytes + _AROUND:
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> FileTooLarge:
    return FileTooLarge(f"file: larger than {most_bytes} bytes")


class _FileForm:
    """The fields of the form, each of which may stand once."""

    def __init__(self, files: FileStore, most_bytes: int) -> None:
        self._files = files
        self._most = most_bytes
        self._given: set[str] = set()
        self._open = ""
        self._purpose = b""
        self._filename = ""
        self._upload: FileUpload | None = None

    async def take(self, event: FormEvent) -> None:
        if isinstance(event, PartBegan):
            self._begin(event)
        elif isinstance(event, PartPiece):
            await self._piece(event.data)
        elif self._open == "purpose":
            self._check_purpose()

    async def end(self) -> JsonObject:
        for name in ("purpose", "file"):
            if name not in self._given:
                raise InvalidInput(name, "is missing")
        assert self._upload is not None
        if not self._upload.size:
            raise InvalidInput("file", "is empty")
        await self._upload.close()
        return await self._upload.end(self._filename)

    async def discard(self) -> None:
        if self._upload is not None:
            await self._upload.discard()

    def _begin(self, part: PartBegan) -> None:
        name = part.name
        if name.startswith("expires_after"):
            raise InvalidInput("expires_after", "is not implemented: a file stays until it is deleted")
        if name not in ("purpose", "file"):
            refuse(name, ..., ("purpose", "file"), what="field of the form")
        if name in self._given:
            raise InvalidInput(name, "is given twice")
        self._given.add(name)
        self._open = name
        if name == "file":
            self._filename = part.filename or ""
            if not 0 < len(self._filename) <= _MAX_NAME:
                raise InvalidInput("file", f"must have a file name of at most {_MAX_NAME} characters")
            self._upload = self._files.begin()

    async def _piece(self, data: bytes) -> None:
        if self._open == "purpose":
            self._purpose = (self._purpose + data)[: _MAX_PURPOSE + 1]
            return
        assert self._upload is not None
        if self._upload.size + len(data) > self._most:
            raise _too_large(self._most)
        await self._upload.write(data)

    def _check_purpose(self) -> None:
        given = self._purpose.decode("utf-8", "replace")
        if given != PURPOSE:
            raise InvalidInput("purpose", f"must be {PURPOSE}, got {shown(given)}")


_MAX_UPLOADS = 8  # at the same time; each holds up to two parts of 5 MiB
_MAX_FILES, _MAX_BATCHES, _BATCHES = 10_000, 100, 20  # OpenAI's bounds and default of a page

_CONTENT_TYPE = "application/octet-stream"

Handler = Callable[[Request], Awaitable[Response]]


def add_batch_routes(host: ServerHost, service: BatchService, options: ServerOptions) -> None:
    endpoints = _BatchEndpoints(service, options)
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
    """The handler of each method, whose errors become answers. A request whose body was not read to its end ends its
    connection."""

    async def answer(request: Request) -> Response:
        try:
            response = await handlers["GET" if request.method == "HEAD" else request.method](request)
        except ClientLeft:
            response = Response(status_code=400)  # the client has left: nothing is sent
        except Exception as error:
            response = _refused(error, read=request.method != "POST")
        request_id = OPENAI_CHAT.request_id({}, request.headers) or str(uuid4())
        response.headers.update(OPENAI_CHAT.headers(request_id))
        return response

    return answer


def _refused(error: Exception, *, read: bool) -> Response:
    refusal = as_refusal(error)
    status, body = OPENAI_CHAT.refusal(refusal)
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    return JSONResponse(body, status, headers if read else {**headers, "connection": "close"})


class _BatchEndpoints:
    """Each method answers the requests of one route, and raises RequestErrors."""

    def __init__(self, service: BatchService, options: ServerOptions) -> None:
        self._service = service
        self._options = options
        self._uploads = 0

    async def create_file(self, request: Request) -> Response:
        files = self._service.places.files
        if self._uploads >= _MAX_UPLOADS:
            raise QueueFull(f"{self._uploads} files arrive already, of {_MAX_UPLOADS} at a time")
        self._uploads += 1
        try:
            options = self._options
            return _json(await receive_file(request, files, options.batch_max_file_bytes, options.piece_timeout))
        finally:
            self._uploads -= 1

    async def list_files(self, request: Request) -> Response:
        allowed = ("limit", "after", "order", "purpose")
        query = read_query(request.query_params, FILE, allowed, _MAX_FILES, _MAX_FILES)
        return _json(await self._service.places.files.page(query))

    async def get_file(self, request: Request) -> Response:
        return _json(await self._service.places.files.get(request.path_params["file_id"]))

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        reader = await self._service.runner.reader(file_id)
        if reader is not None:
            raise InvalidInput("file_id", f"is the input of {reader}, which has not ended")
        return _json(await self._service.places.files.delete(file_id))

    async def file_content(self, request: Request) -> Response:
        files = self._service.places.files
        file = await files.get(request.path_params["file_id"])
        if request.method == "HEAD":
            return Response(headers={"content-length": str(file["bytes"])}, media_type=_CONTENT_TYPE)
        pieces = files.content(file)
        stalled_after = self._options.stalled_reader_timeout
        return _Download(file["bytes"], await anext(pieces, b""), pieces, stalled_after)

    async def create_batch(self, request: Request) -> Response:
        runner = self._service.runner
        body = parse_object(await read_body(request.scope, request.receive, self._options.max_body_bytes))
        return _json((await runner.create(read_batch_request(body))).shown())

    async def list_batches(self, request: Request) -> Response:
        query = read_query(request.query_params, BATCH, ("limit", "after"), _MAX_BATCHES, _BATCHES)
        return _json(await self._service.places.batches.page(query))

    async def get_batch(self, request: Request) -> Response:
        return _json((await self._service.places.batches.get(request.path_params["batch_id"])).shown())

    async def cancel_batch(self, request: Request) -> Response:
        return _json((await self._service.runner.cancel(request.path_params["batch_id"])).shown())


def _json(body: JsonObject) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


class _Download(Response):
    """A file in pieces. The first one was read before the status was chosen. ``stalled_after``: in seconds."""

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
        async with aclosing(self._rest), watched(receive, self._leave), chunks:
            try:
                piece: bytes | None = self._first
                while piece is not None and not self._left:
                    await chunks.write(piece)
                    piece = await anext(self._rest, None)
                await chunks.write(b"", more=False)
            except RequestError as error:
                logger.error(f"The content of a file breaks off: {error.message}")
                abort(scope)

    def _leave(self) -> None:
        self._left = True

    def _stalled(self, scope: Scope) -> None:
        logger.warning(f"A client has read nothing of a file for {self._stalled_after:g} s: its download is closed")
        self._leave()
        abort(scope)
