"""TorchServe's management API over HTTP: paths and their parameters in, JSON out.

Knows nothing of how models are loaded or scaled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from mlserver.logging import logger
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.errors import NotServing, RequestError
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.management.managed_models import ManagedModels
from mlserver_torch_stream.server.management.management_document import document
from mlserver_torch_stream.server.management.management_token import check_token
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.rest.body import ClientLeft, read_body
from mlserver_torch_stream.server.rest.prediction_errors import as_json, status_and_body
from mlserver_torch_stream.server.rest.prediction_head import reply_headers, request_id_of
from mlserver_torch_stream.server.rest.refusal import as_refusal, send_refusal
from mlserver_torch_stream.torchserve.management_refusal import ManagementRefusal, bad_request
from mlserver_torch_stream.torchserve.registration import is_true, whole_number

_MOST_BODY_BYTES = 1 << 20
_MOST_LISTED = 100
_ALL = "all"
Reply = tuple[int, Any]  # a status, and what is written as JSON


class ManagementApp:
    """The ASGI application. ``token``: None where no request needs one."""

    def __init__(self, models: ManagedModels, lifecycle: Lifecycle, token: str | None) -> None:
        self._models = models
        self._lifecycle = lifecycle
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        request = Request(scope, receive)
        request_id = request_id_of(request.headers)
        retry_after = None
        try:
            status, found = await self._answer(request)
            body = as_json(found)
        except ClientLeft:
            return
        except Exception as error:
            refused = as_refusal(error)
            status, body = _status_and_body(refused)
            retry_after = refused.retry_after
        logger.info(f"Management API: {request.method} {request.url.path} {status}")
        await send_refusal(send, status, body, retry_after, reply_headers(request_id))

    async def _answer(self, request: Request) -> Reply:
        """Raises RequestError or ClientLeft."""
        segments = request.url.path.rstrip("/").split("/")[1:]
        method = request.method
        if not segments or segments == ["api-description"]:
            if segments or method == "OPTIONS":
                return 200, document()
            raise _wrong_method()
        check_token(self._token, request.headers.get("authorization"))
        if method != "GET" and self._lifecycle.shutdown_reason is not None:
            raise NotServing(self._lifecycle.shutdown_reason)
        if segments[0] == "models" and len(segments) <= 3:
            name, version = ([*segments[1:], None, None])[:2]
            return await (self._of_all(request) if name is None else self._of_one(request, name, version))
        if segments[0] == "models" and len(segments) == 4 and segments[3] == "set-default":
            if method != "PUT":
                raise _wrong_method()
            self._models.set_default(segments[1], segments[2])
            of = f'model "{segments[1]}" to "{segments[2]}"'
            return 200, {"status": f"Default version successfully updated for {of}"}
        if segments[:2] == ["v1", "models"] and len(segments) == 3 and method == "GET":
            model = self._models.find(segments[2].partition(":")[0], None)
            return 200, {"name": model.name, "ready": bool(model.ready)}
        raise ManagementRefusal(
            404, "ResourceNotFoundException", "Requested resource is not found, please refer to API document."
        )

    async def _of_all(self, request: Request) -> Reply:
        if request.method == "GET":
            return 200, self._list(request.query_params)
        if request.method == "POST":
            status, said = await self._models.register(await _parameters(request))
            return status, {"status": said}
        raise _wrong_method()

    async def _of_one(self, request: Request, name: str, version: str | None) -> Reply:
        query = request.query_params
        if request.method == "GET":
            return 200, await self._describe(request, name, version)
        if request.method == "PUT":
            return await self._scale(query, name, version or query.get("model_version"))
        if request.method == "DELETE":
            await self._models.unregister(name, version)
            return 200, {"status": f'Model "{name}" unregistered'}
        if request.method == "OPTIONS":
            self._models.find(name, version)
            return 200, document()
        raise _wrong_method()

    def _list(self, query: Mapping[str, str]) -> dict[str, Any]:
        limit = whole_number(query, "limit") if "limit" in query else _MOST_LISTED
        limit = limit if 0 <= limit <= _MOST_LISTED else _MOST_LISTED
        first = max(0, whole_number(query, "next_page_token")) if "next_page_token" in query else 0
        found = [{"modelName": name, "modelUrl": url} for name, url in self._models.urls().items()]
        last = first + limit
        more = {"nextPageToken": str(last)} if last <= len(found) else {}
        return {**more, "models": found[first:last]}

    async def _describe(self, request: Request, name: str, version: str | None) -> list[dict[str, Any]]:
        if version == _ALL:
            return [self._models.describe(model) for model in self._models.versions(name)]
        model = self._models.find(name, version)
        described = self._models.describe(model)
        if is_true(request.query_params.get("customized")):
            described["customizedMetadata"] = await _customized(model, dict(request.headers))
        return [described]

    async def _scale(self, query: Mapping[str, str], name: str, version: str | None) -> Reply:
        least = whole_number(query, "min_worker") if "min_worker" in query else 1
        most = whole_number(query, "max_worker") if "max_worker" in query else least
        timeout = whole_number(query, "timeout") if "timeout" in query else -1
        if least < 0:
            raise bad_request(f"min_worker: must not be below 0, got {least}")
        if most < least:
            raise bad_request("max_worker cannot be less than min_worker.")
        grace = None if timeout < 0 else float(timeout)
        if not is_true(query.get("synchronous")):
            await self._models.scale_later(name, version, least, most, grace)
            return 202, {"status": "Processing worker updates..."}
        await self._models.scale(name, version, least, most, grace)
        of = f"{name}, version: {version}" if version is not None else name
        return 200, {"status": f"Workers scaled to {least} for model: {of}"}


async def _customized(model: Any, headers: dict[str, str]) -> dict[str, Any]:
    """What the handler says of itself, which is to be a JSON object, as in TorchServe. Raises RequestError."""
    if not hasattr(model, "open_prediction"):
        return {}
    reply = model.open_prediction((), {**headers, "describe": "True"}, str(uuid4()), EndpointKind.REST_UNARY)
    try:
        said = b"".join([piece.value async for piece in reply.pieces()])
    finally:
        reply.close()
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        logger.warning(f"Model '{model.name}': its customized metadata is no JSON object")
        return {}
    return found


async def _parameters(request: Request) -> Mapping[str, Any]:
    """Those of the query, or a JSON object in the body. Raises RequestError or ClientLeft."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return request.query_params
    body = await read_body(request.scope, request.receive, _MOST_BODY_BYTES)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    return {key: value for key, value in found.items() if value is not None}


def _status_and_body(error: RequestError) -> tuple[int, bytes]:
    if isinstance(error, ManagementRefusal):
        return error.status, as_json({"code": error.status, "type": error.kind, "message": error.message})
    if isinstance(error, NotServing):
        message = {"code": error.status, "type": "ServiceUnavailableException", "message": error.message}
        return error.status, as_json(message)
    return status_and_body(error)


def _wrong_method() -> ManagementRefusal:
    return ManagementRefusal(
        405, "MethodNotAllowedException", "Requested method is not allowed, please refer to API document."
    )
