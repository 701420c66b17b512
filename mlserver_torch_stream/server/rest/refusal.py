"""An error as a REST client sees it before the first token: status, message, ``Retry-After``.

In V2 a request to a registered model is never answered 400 or 404: Seldon Core 2's agent takes these statuses as "model
not loaded" and reloads the model.
"""

from __future__ import annotations

from mlserver.errors import MLServerError, ModelNotFound, ModelNotReady
from mlserver.logging import logger
from starlette.types import Send

from mlserver_torch_stream.errors import GenerationFailed, NotServing, RequestError, UnknownModel

EncodedHeaders = list[tuple[bytes, bytes]]
_INTERNAL = "internal server error"
_NO_CONTENT = 204  # has no content-length, says RFC 9110


def as_refusal(error: Exception, shutdown_reason: str | None = None) -> RequestError:
    """Any exception as an error of the error table. An unexpected exception is a bug, and logged with its traceback.

    ``shutdown_reason``: why the process accepts no more requests; None while it does.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ModelNotReady):
        return NotServing(str(error))
    if isinstance(error, ModelNotFound) and shutdown_reason is not None:
        return NotServing(shutdown_reason)  # an interrupted load has left the registry: 404 would be wrong
    if isinstance(error, MLServerError):
        refused = RequestError(str(error))
        refused.status = int(error.status_code)
        if isinstance(error, ModelNotFound):
            refused.field, refused.code = UnknownModel.field, UnknownModel.code
        return refused
    logger.error("A request failed", exc_info=error)
    return GenerationFailed(_INTERNAL)


async def send_refusal(send: Send, status: int, body: bytes, retry_after: int | None, headers: EncodedHeaders) -> None:
    again = [(b"retry-after", str(retry_after).encode())] if retry_after is not None else []
    await send_json(send, status, body, [*headers, *again])


async def send_json(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *headers])


async def send_whole(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    always = [] if status == _NO_CONTENT else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
