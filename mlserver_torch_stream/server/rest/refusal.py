"""An error as a REST client sees it before the first token: status, message, ``Retry-After``.

In V2 a request to a registered model is never answered 400 or 404: Seldon Core 2's agent takes these statuses as "model
not loaded" and reloads the model.
"""

from __future__ import annotations

from starlette.types import Send

EncodedHeaders = list[tuple[bytes, bytes]]
_INTERNAL = "internal server error"
_NO_CONTENT = 204  # has no content-length, says RFC 9110


async def send_refusal(send: Send, status: int, body: bytes, retry_after: int | None, headers: EncodedHeaders) -> None:
    again = [(b"retry-after", str(retry_after).encode())] if retry_after is not None else []
    await send_json(send, status, body, [*headers, *again])


async def send_json(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *headers])


async def send_whole(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    always = [] if status == _NO_CONTENT else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
