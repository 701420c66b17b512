"""Answers the HTTP requests of TorchServe's management API with JSON.

Knows nothing of how models are loaded or scaled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from mlserver.logging import logger
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import NotServing, RequestError
from mlserver_torch_stream.server.lifecycle.inflight_requests import OneTimeEvent
from mlserver_torch_stream.server.lifecycle.lifecycle import is_done_before
from mlserver_torch_stream.server.management.management_calls import ManagementCalls
from mlserver_torch_stream.server.management.management_document import document
from mlserver_torch_stream.server.management.management_token import check_token
from mlserver_torch_stream.server.rest.body import ClientLeft, read_body
from mlserver_torch_stream.server.rest.prediction_errors import as_json, status_and_body
from mlserver_torch_stream.server.rest.prediction_head import reply_headers, request_id_of
from mlserver_torch_stream.server.rest.refusal import as_refusal, send_refusal
from mlserver_torch_stream.torchserve.management_refusal import ManagementRefusal, bad_request
from mlserver_torch_stream.torchserve.registration import is_true

_MOST_BODY_BYTES = 1 << 20
Reply = tuple[int, Any]  # a status, and the value that is written as JSON


class ManagementApp:
    """The ASGI application. ``token``: None where no request needs one."""

    def __init__(self, calls: ManagementCalls, token: str | None) -> None:
        self._calls = calls
        self._token = token
        self.ending = OneTimeEvent()  # set when the port is about to be closed: requests that still run are refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_id = request_id_of(request.headers)
        retry_after = None
        try:
            status, found = await self._answer_in_time(request)
            body = as_json(found)
        except ClientLeft:
            return
        except Exception as error:
            refused = as_refusal(error)
            status, body = _status_and_body(refused)
            retry_after = refused.retry_after
        logger.info(f"Management API: {request.method} {scope['path']!r} {status}")
        await send_refusal(send, status, body, retry_after, reply_headers(request_id))

    async def _answer_in_time(self, request: Request) -> Reply:
        """Raises RequestError or ClientLeft."""
        answering = asyncio.ensure_future(self._answer(request))
        if await is_done_before(answering, self.ending):
            return answering.result()
        answering.cancel()
        raise NotServing("the server is shutting down")

    async def _answer(self, request: Request) -> Reply:
        """Raises RequestError or ClientLeft."""
        segments = request.scope["path"].rstrip("/").split("/")[1:]
        method = request.method
        if not segments or segments == ["api-description"]:
            if segments or method == "OPTIONS":
                return 200, document()
            raise _wrong_method()
        check_token(self._token, request.headers.get("authorization"))
        if segments[0] == "models" and len(segments) <= 3:
            name, version = ([*segments[1:], None, None])[:2]
            return await (self._of_all(request) if name is None else self._of_one(request, name, version))
        if segments[0] == "models" and len(segments) == 4 and segments[3] == "set-default":
            if method != "PUT":
                raise _wrong_method()
            return 200, {"status": self._calls.set_default(segments[1], segments[2])}
        if segments[:2] == ["v1", "models"] and len(segments) == 3 and method == "GET":
            model = self._calls.models.find(segments[2].partition(":")[0], None)
            return 200, {"name": model.name, "ready": bool(model.ready)}
        raise ManagementRefusal(
            404, "ResourceNotFoundException", "Requested resource is not found, please refer to API document."
        )

    async def _of_all(self, request: Request) -> Reply:
        if request.method == "GET":
            return 200, self._calls.list(request.query_params)
        if request.method == "POST":
            status, said = await self._calls.register(await _parameters(request))
            return status, {"status": said}
        raise _wrong_method()

    async def _of_one(self, request: Request, name: str, version: str | None) -> Reply:
        query = request.query_params
        if request.method == "GET":
            customized = is_true(query.get("customized"))
            headers = {key: value for key, value in request.headers.items() if key != "authorization"}
            return 200, await self._calls.describe(name, version, customized, headers)
        if request.method == "PUT":
            status, said = await self._calls.scale(query, name, version or query.get("model_version"))
            return status, {"status": said}
        if request.method == "DELETE":
            return 200, {"status": await self._calls.unregister(name, version)}
        if request.method == "OPTIONS":
            self._calls.models.find(name, version)
            return 200, document()
        raise _wrong_method()


async def _parameters(request: Request) -> Mapping[str, Any]:
    """The parameters of the query, or of a JSON object in the body. Raises RequestError or ClientLeft."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return request.query_params
    body = await read_body(request.scope, request.receive, _MOST_BODY_BYTES)
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    return {key: value for key, value in found.items() if value is not None}


def _status_and_body(error: RequestError) -> tuple[int, bytes]:
    if isinstance(error, ManagementRefusal):
        return error.status, as_json({"code": error.status, "type": error.kind, "message": error.message})
    return status_and_body(error)


def _wrong_method() -> ManagementRefusal:
    return ManagementRefusal(
        405, "MethodNotAllowedException", "Requested method is not allowed, please refer to API document."
    )
