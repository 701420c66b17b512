"""Lets a TorchServe, or a server with TorchServe's paths, predict objects and chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from mlserver_torch_stream.client.http_transport import retry_after_s
from mlserver_torch_stream.cloud.answers import AnswerTooLarge, PieceCollector, answer_too_large, parse, predicted
from mlserver_torch_stream.cloud.endpoint import (
    MAX_ERROR_CHARACTERS,
    UNREADABLE,
    RowBackend,
    RowFailed,
    ServerUnready,
    lasting_refusal,
)
from mlserver_torch_stream.cloud.rows import CloudError, Outcome, Row, StoreUnavailable

_OK = range(200, 300)
_BUSY = ("ServiceUnavailableException",)  # a full queue or no worker; a failing handler has another type
_UNKNOWN = ("ModelNotFoundException", "ModelVersionNotFoundException")


class PredictionBackend(RowBackend):
    """Posts each object or chunk to ``/predictions/{model}``, where the model is a handler's name or
    ``name/version``.
    """

    async def _one(self, row: Row) -> Outcome:
        request = self.endpoint.object_request
        headers = {
            **request.all_headers(row),
            "content-type": request.content_type(row),
            "x-request-id": request.request_id(row),
        }
        return await self._tried(lambda alone: self._attempt(row.data, headers, alone))

    async def _attempt(self, content: bytes, headers: Mapping[str, str], alone: bool) -> Outcome:
        pieces = PieceCollector()
        async with self.gate.through(alone) as started:
            began = time.monotonic()
            try:
                async with self._posted(f"/predictions/{quote(self.model)}", content, headers) as response:
                    await pieces.read(response.content, response.headers.get("content-type", ""))
            except AnswerTooLarge as error:
                return answer_too_large(str(error))
            except StoreUnavailable as error:
                if pieces.found:  # the handler failed after its first piece, for example
                    text = f"{error}, after {len(pieces.found)} piece{'s' * (len(pieces.found) > 1)} of the answer"
                    raise RowFailed(text, UNREADABLE) from error
                raise
            if response.status not in _OK:
                raise self._refused(started, response, b"".join(value for value, _ in pieces.found))
            self.gate.concurrency.answered()
        return predicted(pieces.found, self.endpoint.object_request.pieces, (began, time.monotonic()))

    def _refused(self, started: int, answer: aiohttp.ClientResponse, body: bytes) -> CloudError:
        error, status = _torchserve_error(body), answer.status
        kind = str(error.get("type"))
        text = str(error.get("message") or body.decode(errors="replace")[:MAX_ERROR_CHARACTERS].strip())
        text = self._without_key(f"{self._url} answered {status}: {text}")
        if status == 429 or kind in _BUSY:
            self.gate.concurrency.refused(started)
            return ServerUnready(text, retry_after_s(answer.headers))
        return lasting_refusal(text, status, missing=kind in _UNKNOWN)


def _torchserve_error(body: bytes) -> Mapping[str, Any]:
    """Returns TorchServe's error object; empty if the body was written by the handler."""
    try:
        found = parse(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"code", "type", "message"} <= set(found) else {}
