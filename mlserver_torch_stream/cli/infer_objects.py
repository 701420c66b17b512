"""Infers whole objects, or chunks of them, with a server: by ``/predictions/{model}`` or as a BYTES tensor.

Each post has a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import h11

from mlserver_torch_stream.cli.answers_http import parse
from mlserver_torch_stream.cli.argument_types import authorization, without_key
from mlserver_torch_stream.cli.infer_http import (
    MAX_ERROR_CHARACTERS,
    HttpInfer,
    RowFailed,
    ServerUnready,
    lasting_refusal,
    unreadable_answer,
)
from mlserver_torch_stream.cli.object_row import AnswerTooLarge, ObjectRequest, PieceCollector, answer_too_large
from mlserver_torch_stream.client.http_transport import retry_after_s
from mlserver_torch_stream.cloud.backoff import within
from mlserver_torch_stream.cloud.parse import MAX_ANSWER_BYTES, PREDICTIONS
from mlserver_torch_stream.cloud.rows import CloudError, Outcome, Row, StoreUnavailable

_AT_ONCE = 1 << 16
_CONNECT_S = 10.0


class ConnectionBroke(Exception):
    """The server is not there, is silent, or ends its answer early."""


class NotConnected(ConnectionBroke):
    """The server takes no connection."""


@dataclass(frozen=True, slots=True)
class PostedPiece:
    """One chunk of an answer, or a whole answer without chunks. The names of ``headers`` are in lower case."""

    status: int
    headers: Mapping[str, str]
    value: bytes


@dataclass(frozen=True)
class PostForPieces:
    """``timeout``: the longest silence in seconds."""

    url: str
    timeout: float
    headers: Mapping[str, str] = field(default_factory=dict)

    async def pieces(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[PostedPiece, None]:
        """At least one. Raises ConnectionBroke or AnswerTooLarge."""
        try:
            reader, writer = await self._connect()
            try:
                connection = h11.Connection(h11.CLIENT)
                writer.write(b"".join(_encoded(connection, self._request(path, content, headers), content)))
                async for each in _answer(connection, reader, self.timeout):
                    yield each
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.TimeoutError, h11.ProtocolError) as error:
            raise ConnectionBroke(f"{self.url}: {error or type(error).__name__}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises NotConnected."""
        parts = urlsplit(self.url)
        safe = parts.scheme == "https"
        port = parts.port or (443 if safe else 80)
        connecting = asyncio.open_connection(parts.hostname, port, ssl=safe or None)
        try:
            return await within(connecting, _CONNECT_S, lambda opened: opened[1].close())
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise NotConnected(f"{self.url}: {error or type(error).__name__}") from error

    def _request(self, path: str, content: bytes, headers: Mapping[str, str]) -> h11.Request:
        parts = urlsplit(self.url)
        own = {"Host": parts.netloc.rpartition("@")[2], "Content-Length": str(len(content)), "Connection": "close"}
        said = list({**self.headers, **headers, **own}.items())
        return h11.Request(method="POST", target=parts.path + path, headers=said)


def _encoded(connection: h11.Connection, request: h11.Request, content: bytes) -> list[bytes]:
    events = (request, h11.Data(data=content), h11.EndOfMessage())
    return [data for event in events if (data := connection.send(event)) is not None]


async def _answer(
    connection: h11.Connection, reader: asyncio.StreamReader, timeout: float
) -> AsyncGenerator[PostedPiece, None]:
    status, piece, any_piece = 0, bytearray(), False
    headers: Mapping[str, str] = {}
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await within(reader.read(_AT_ONCE), timeout))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            piece += event.data
            if len(piece) > MAX_ANSWER_BYTES:
                raise AnswerTooLarge(f"a piece of the answer is more than {MAX_ANSWER_BYTES} bytes")
            if event.chunk_end:
                yield PostedPiece(status, headers, bytes(piece))
                piece, any_piece = bytearray(), True
        elif isinstance(event, h11.EndOfMessage):
            if piece or not any_piece:
                yield PostedPiece(status, headers, bytes(piece))
            return


_OK = range(200, 300)
_SLOWER = ("ServiceUnavailableException",)  # a full queue, no worker; a handler that fails has another type
_CUT = 502  # the status of an answer that breaks off
_UNKNOWN = ("ModelNotFoundException", "ModelVersionNotFoundException")


@dataclass
class PredictionInfer(HttpInfer):
    """``model``: the handler's model, or ``model/version``."""

    request: ObjectRequest = field(default_factory=ObjectRequest)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._post = PostForPieces(self.url, self.timeout, authorization(self.key))

    async def _one(self, row: Row) -> Outcome:
        headers = {
            **self.request.all_headers(row),
            "content-type": self.request.content_type(row),
            "x-request-id": self.request.request_id(row),
        }
        return await self._tried(lambda alone: self._posted(row.data, headers, alone))

    async def _posted(self, content: bytes, headers: Mapping[str, str], alone: bool) -> Outcome:
        found = PieceCollector()
        async with self.gate.through(alone) as started:
            began = time.monotonic()
            try:
                path = f"/predictions/{quote(self.model)}"
                async with aclosing(self._post.pieces(path, content, headers)) as pieces:
                    async for piece in pieces:
                        found.add(piece.value, piece.headers.get("content-type", ""))
            except ConnectionBroke as error:
                if found.found:  # as where the handler fails after its first piece
                    raise RowFailed(f"{error}, after {len(found.found)} pieces of the answer", _CUT) from error
                kind = ServerUnready if isinstance(error, NotConnected) else StoreUnavailable
                raise kind(str(error)) from error
            except AnswerTooLarge as error:
                return answer_too_large(error)
            if piece.status not in _OK:
                raise self._refused(started, piece, b"".join(value for value, _ in found.found))
            self.gate.concurrency.answered()
        return self.request.outcome(found.found, (began, time.monotonic()))

    def _refused(self, started: int, answer: PostedPiece, body: bytes) -> CloudError:
        error, status = _error(body), answer.status
        kind = str(error.get("type"))
        text = str(error.get("message") or body.decode(errors="replace")[:MAX_ERROR_CHARACTERS].strip())
        text = without_key(f"{self.url} answered {status}: {text}")
        if status == 429 or kind in _SLOWER:
            self.gate.concurrency.refused(started)
            return ServerUnready(text, retry_after_s(answer.headers))
        return lasting_refusal(text, status, missing=kind in _UNKNOWN)


def _error(body: bytes) -> Mapping[str, Any]:
    """TorchServe's error object; empty where the body is a handler's own."""
    try:
        found = parse(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"code", "type", "message"} <= set(found) else {}


_JSON_BYTES = "Inference-Header-Content-Length"


@dataclass
class TensorInfer(HttpInfer):
    """The prediction for a request is the list of its output tensors."""

    tensor: str = "body"
    request: ObjectRequest = field(default_factory=ObjectRequest)

    async def _one(self, row: Row) -> Outcome:
        raw = len(row.data).to_bytes(4, "little") + row.data
        tensor: dict[str, Any] = {"name": self.tensor, "shape": [1], "datatype": "BYTES"}
        tensor["parameters"] = {"binary_data_size": len(raw), "content_type": self.request.content_type(row)}
        head = json.dumps({"parameters": self.request.all_headers(row), "inputs": [tensor]}).encode()
        return await self._tried(lambda alone: self._tensor_attempt(len(head), head + raw, alone))

    async def _tensor_attempt(self, head: int, content: bytes, alone: bool) -> Outcome:
        path = f"/v2/models/{quote(self.model, safe='')}/infer"
        headers = {"Content-Type": "application/octet-stream", _JSON_BYTES: str(head)}
        async with self.gate.through(alone) as started:
            began, pieces = time.monotonic(), PieceCollector()
            async with self._answered(started, path, content, headers) as response:
                try:
                    async for part in response.aiter_bytes():
                        pieces.add(part, "")
                except AnswerTooLarge as error:
                    return answer_too_large(error)
        outputs = _outputs(b"".join(part for part, _ in pieces.found))
        body = {"object": "prediction", "content_type": "application/json", PREDICTIONS: [outputs]}
        return Outcome(body, span=(began, time.monotonic()))


def _outputs(answer: bytes) -> list[dict[str, Any]]:
    """Raises RowFailed."""
    try:
        return [
            {key: tensor[key] for key in ("name", "datatype", "shape", "parameters", "data") if key in tensor}
            for tensor in parse(answer)["outputs"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable_answer(error) from None
