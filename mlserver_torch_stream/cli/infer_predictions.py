"""Infers whole objects, or chunks of them, with a TorchServe, or with a server of ours: ``POST /predictions/{model}``.

Knows TorchServe's statuses and error objects. Knows nothing of objects and outputs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mlserver_torch_stream.cli.answers_http import parse
from mlserver_torch_stream.cli.infer_http import (
    MOST_ERROR_CHARACTERS,
    HttpInfer,
    RowFailed,
    ServerUnready,
    lasting_refusal,
)
from mlserver_torch_stream.cli.object_row import AnswerTooLarge, ObjectRequest, PieceCollector, answer_too_large
from mlserver_torch_stream.cli.openai_key import authorization, without_key
from mlserver_torch_stream.cli.posted_pieces import ConnectionBroke, NotConnected, PostedPiece, PostForPieces
from mlserver_torch_stream.client.http_transport import retry_after_s
from mlserver_torch_stream.cloud.cloud_errors import CloudError, StoreUnavailable
from mlserver_torch_stream.cloud.rows import Outcome, Row

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
        text = str(error.get("message") or body.decode(errors="replace")[:MOST_ERROR_CHARACTERS].strip())
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
