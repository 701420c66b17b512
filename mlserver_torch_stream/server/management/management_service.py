"""TorchServe's management API over gRPC: messages in, a text or a status out.

As in TorchServe, a field that is 0, empty or false is not given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from mlserver.logging import logger

from mlserver_torch_stream.handlers.config.store_files import ManagementRefusal, bad_request
from mlserver_torch_stream.server.management.management_calls import ManagementCalls, check_token
from mlserver_torch_stream.server.management.management_messages import message_class
from mlserver_torch_stream.server.rest.prediction_errors import as_json
from mlserver_torch_stream.server.rest.refusal import as_refusal
from mlserver_torch_stream.server.torchserve_grpc.inference_service import end_call

_SERVICE = "org.pytorch.serve.grpc.management.ManagementAPIsService"
_Call = Callable[[Mapping[str, Any]], Awaitable[str]]  # the fields that are given -> the message of the reply


class ManagementService:
    """``token``: None where no call needs one."""

    def __init__(self, calls: ManagementCalls, token: str | None) -> None:
        self._calls = calls
        self._token = token

    def handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, _Call] = {
            "DescribeModel": self._describe,
            "ListModels": self._list,
            "RegisterModel": self._register,
            "ScaleWorker": self._scale,
            "SetDefault": self._set_default,
            "UnregisterModel": self._unregister,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._answer, name, call))
            for name, call in methods.items()
        }
        return grpc.method_handlers_generic_handler(_SERVICE, handlers)

    async def _answer(self, name: str, call: _Call, message: bytes, context: grpc.ServicerContext) -> bytes:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        try:
            self._check(metadata.get("authorization"))
            said = await call(_fields(f"{name}Request", message))
            logger.info(f"Management API: {name} OK")
            return bytes(message_class("ManagementResponse")(msg=said).SerializeToString())
        except Exception as error:
            refused = as_refusal(error)
            logger.info(f"Management API: {name} {refused.message!r}")
            end_call(context, refused)
            return b""  # it is not sent beside a status

    def _check(self, authorization: str | None) -> None:
        try:
            check_token(self._token, authorization)
        except ManagementRefusal as refusal:  # over gRPC it is PERMISSION_DENIED
            raise ManagementRefusal(403, refusal.kind, refusal.message) from None

    async def _describe(self, given: Mapping[str, Any]) -> str:
        customized = bool(given.get("customized"))
        return _text(await self._calls.describe(_name(given), given.get("model_version"), customized, {}))

    async def _list(self, given: Mapping[str, Any]) -> str:
        return _text(self._calls.list(given))

    async def _register(self, given: Mapping[str, Any]) -> str:
        _, said = await self._calls.register({"synchronous": False, **given})
        return said

    async def _scale(self, given: Mapping[str, Any]) -> str:
        _, said = await self._calls.scale(given, _name(given), given.get("model_version"))
        return said

    async def _set_default(self, given: Mapping[str, Any]) -> str:
        return self._calls.set_default(_name(given), str(given.get("model_version", "")))

    async def _unregister(self, given: Mapping[str, Any]) -> str:
        return await self._calls.unregister(_name(given), given.get("model_version"))


def _fields(kind: str, message: bytes) -> dict[str, Any]:
    """The fields that the message sets. Raises RequestError."""
    try:
        parsed = message_class(kind).FromString(message)
    except DecodeError as error:
        raise bad_request(f"not a {kind}: {error}") from None
    return {field.name: value for field, value in parsed.ListFields()}


def _name(given: Mapping[str, Any]) -> str:
    if "model_name" not in given:
        raise bad_request("Parameter model_name is required.")
    return str(given["model_name"])


def _text(found: Any) -> str:
    return as_json(found).decode().rstrip("\n")
