"""An error as a REST client sees it before the first token: status, JSON, ``Retry-After``.

Knows no route. A request to a registered model is never answered 400 or 404: Seldon Core 2's agent takes those as
"model not loaded" and reloads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from mlserver.errors import MLServerError, ModelNotFound, ModelNotReady
from mlserver.logging import logger
from pydantic import ValidationError
from starlette.types import Send

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, RequestError

EncodedHeaders = list[tuple[bytes, bytes]]
_INTERNAL = "internal server error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is said instead of an answer."""

    status: int
    message: str
    retry_after: int | None = None

    async def send(self, send: Send) -> None:
        headers = [(b"retry-after", str(self.retry_after).encode())] if self.retry_after is not None else []
        await send_json(send, self.status, orjson.dumps({"error": self.message}), headers)


def as_refusal(error: Exception) -> Refusal:
    """Any exception, with its row of the error table. One that is not in it is a bug, and logged with its traceback."""
    if isinstance(error, ModelNotReady):
        error = NotServing(str(error))
    if isinstance(error, RequestError):
        return Refusal(error.status, error.message, getattr(error, "retry_after", None))
    if isinstance(error, ModelNotFound):
        return Refusal(404, str(error))
    if isinstance(error, MLServerError):
        return Refusal(int(error.status_code), str(error))
    logger.error("A request failed", exc_info=error)
    return Refusal(GenerationFailed.status, _INTERNAL)


def as_invalid_input(error: ValidationError) -> InvalidInput:
    """The first field that pydantic complains about."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return InvalidInput(".".join(str(part) for part in first["loc"]) or "body", first["msg"])


async def send_json(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *headers])


async def send_whole(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    always = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
