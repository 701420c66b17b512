"""Implements vLLM's paths that load and unload LoRA adapters while the server runs. A setting switches them on.

Like every path they need a key if the server has keys. A folder must be below ``lora_root``, so that a client cannot
choose arbitrary files of the server. A hub id is accepted unless the hub is switched off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput, UnknownModel
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.host import ServerHost, default_models, find_model
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import as_refusal
from mlserver_torch_stream.server.rest.connection import ClientLeft, parse_object, read_body
from mlserver_torch_stream.server.rest.openai_routes import openai_answer
from mlserver_torch_stream.server.token_model import TokenModel, find_adapter

_OURS = "torch_stream:adapters"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAME = re.compile(r"[\w.:/-]{1,128}")


def add_routes(host: ServerHost, options: ServerOptions) -> None:
    """Adds the paths that load and unload LoRA adapters, if the server's settings allow it."""
    if not options.runtime_lora_updating:
        return
    adapters = _AdapterRoutes(host, options)
    for prefix in OPENAI_PREFIXES:
        host.add_routes(
            [
                Route(f"{prefix}/load_lora_adapter", adapters.load, methods=["POST"], name=_OURS),
                Route(f"{prefix}/unload_lora_adapter", adapters.unload, methods=["POST"], name=_OURS),
            ]
        )


class _AdapterRoutes:
    def __init__(self, host: ServerHost, options: ServerOptions) -> None:
        self._registry = host.registry
        self._root = options.lora_root
        self._max_body_bytes = options.max_body_bytes

    async def load(self, request: Request) -> Response:
        return await self._answer(request, self._load)

    async def unload(self, request: Request) -> Response:
        return await self._answer(request, self._unload)

    async def _answer(self, request: Request, act: Callable[[JsonObject], Awaitable[str]]) -> Response:
        try:
            body = parse_object(await read_body(request.scope, request.receive, self._max_body_bytes))
            return PlainTextResponse(await act(body))
        except ClientLeft:
            return Response(status_code=400)  # not sent, because the client has disconnected
        except Exception as error:
            return openai_answer(request, *OPENAI_CHAT.refusal(as_refusal(error)))

    async def _load(self, body: JsonObject) -> str:
        _known(body, "lora_name", "lora_path", "model")
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if not _NAME.fullmatch(name):
            raise InvalidInput("lora_name", "must be 1 to 128 letters, digits or . : / _ -")
        if find_model(self._registry, name, None) is not None or find_adapter(self._registry, name) is not None:
            raise InvalidInput("lora_name", f"{name!r} is already the name of a model or an adapter")
        adapters = self._owner(body).adapters
        assert adapters is not None
        await adapters.load(name, place_of(self._root, path))
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload(self, body: JsonObject) -> str:
        _known(body, "lora_name", "lora_int_id")
        name = _text(body, "lora_name")
        owner = find_adapter(self._registry, name)
        if owner is None or owner.adapters is None:
            raise UnknownModel(name)
        await owner.adapters.unload(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _owner(self, body: JsonObject) -> TokenModel:
        """Returns the model for the adapter: the one that the body names, or the only one that accepts adapters."""
        models = [model for model in default_models(self._registry) if isinstance(model, TokenModel)]
        takers = [model for model in models if model.adapters is not None]
        if "model" in body:
            takers = [model for model in takers if model.name == body["model"]]
        if len(takers) != 1:
            raise InvalidInput(
                "model", "must name a model that accepts adapters, which has enable_lora in parameters.extra.vllm"
            )
        return takers[0]


def place_of(root: str, path: str) -> str:
    """Returns the folder or hub id for a client's ``path``, which may be a folder below ``root``, if ``root`` is set,
    or a hub id.

    Raises InvalidInput for any other path.
    """
    if root:
        with suppress(OSError, ValueError):  # a path that is too long, or contains NUL
            found = Path(root, path).resolve()
            if found.is_relative_to(Path(root).resolve()) and found.is_dir():
                return str(found)
    if _HUB_ID.fullmatch(path) and not os.path.exists(path) and not _hub_is_off():
        return path
    raise InvalidInput(
        "lora_path", "is neither a folder below the server's lora_root nor a hub id that the server can download"
    )


def _hub_is_off() -> bool:
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _known(body: JsonObject, *keys: str) -> None:
    for key in body:
        if key not in keys:
            raise InvalidInput(key, f"unknown key{did_you_mean(key, keys, str)}")


def _text(body: JsonObject, key: str) -> str:
    value: Any = body.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidInput(key, "must be a string that is not empty")
    return value
