"""An error as a REST client sees it before the first token: status, message, ``Retry-After``.

Knows no route, nor the spelling of the body. In V2 a request to a registered model is never answered 400 or 404: Seldon
Core 2's agent takes those as "model not loaded" and reloads the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlserver.errors import MLServerError, ModelNotFound, ModelNotReady
from mlserver.logging import logger
from starlette.types import Send

from mlserver_torch_stream.errors import GenerationFailed, NotServing, RequestError

EncodedHeaders = list[tuple[bytes, bytes]]
_INTERNAL = "internal server error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reply to a request that is refused. ``field``: the part of the request that is wrong."""

    status: int
    message: str
    retry_after: int | None = None
    field: str | None = None

    async def send(self, send: Send, body: bytes) -> None:
        headers = [(b"retry-after", str(self.retry_after).encode())] if self.retry_after is not None else []
        await send_json(send, self.status, body, headers)


def as_refusal(error: Exception) -> Refusal:
    """Any exception, with its row of the error table. One that is not in it is a bug, and logged with its traceback."""
    if isinstance(error, ModelNotReady):
        error = NotServing(str(error))
    if isinstance(error, RequestError):
        return Refusal(error.status, error.message, getattr(error, "retry_after", None), getattr(error, "field", None))
    if isinstance(error, ModelNotFound):
        return Refusal(404, str(error))
    if isinstance(error, MLServerError):
        return Refusal(int(error.status_code), str(error))
    logger.error("A request failed", exc_info=error)
    return Refusal(GenerationFailed.status, _INTERNAL)


async def send_json(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *headers])


async def send_whole(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    always = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
