"""Receives one file of a form and writes it to the store as it arrives: only pieces of it are in memory.

Knows nothing of what the file holds. A file over the bound is refused as soon as that is known; the rest is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request

from mlserver_torch_stream.batches.file_store import PURPOSE, FileStore, FileUpload
from mlserver_torch_stream.batches.store_errors import FileTooLarge
from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.protocol.values import shown
from mlserver_torch_stream.server.rest.body import ClientLeft, UnknownCoding, as_length
from mlserver_torch_stream.server.rest.form_reader import FormEvent, FormReader, PartBegan, PartPiece

_AROUND = 64 * 1024  # bytes of a form beside its file
_MOST_NAME = 255  # characters
_MOST_PURPOSE = 64  # bytes


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
            if not 0 < len(self._filename) <= _MOST_NAME:
                raise InvalidInput("file", f"must have a file name of at most {_MOST_NAME} characters")
            self._upload = self._files.begin()

    async def _piece(self, data: bytes) -> None:
        if self._open == "purpose":
            self._purpose = (self._purpose + data)[: _MOST_PURPOSE + 1]
            return
        assert self._upload is not None
        if self._upload.size + len(data) > self._most:
            raise _too_large(self._most)
        await self._upload.write(data)

    def _check_purpose(self) -> None:
        given = self._purpose.decode("utf-8", "replace")
        if given != PURPOSE:
            raise InvalidInput("purpose", f"must be {PURPOSE}, got {shown(given)}")
