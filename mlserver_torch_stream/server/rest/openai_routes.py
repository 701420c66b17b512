"""Serves OpenAI's list of models and the OpenAPI document, and answers unknown paths below ``/v1``.

Models of other runtimes and handlers are not listed. For a handler, the path returns whether it is ready, because
KServe's V1 protocol uses the same path for this. Paths of other runtimes' models are left to MLServer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from mlserver.registry import MultiModelRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Scope

from mlserver_torch_stream.errors import NotServing, UnknownModel
from mlserver_torch_stream.protocol.openai_document import openai_document
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.openai_stream import error_object
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.host import ServerHost, default_models, find_model
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import HandlerModel, is_ours
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute
from mlserver_torch_stream.server.token_model import TokenModel, find_adapter, name_of_alias

_NAME = "torch_stream:models"
_OWNER = "mlserver-torch-stream"


def add_model_routes(host: ServerHost, options: ServerOptions) -> None:
    """Puts the routes before MLServer's. Called once for a server."""
    models = OpenAIModels(host.registry, options)
    for prefix in OPENAI_PREFIXES:
        routes = [
            Route(f"{prefix}/openapi.json", _document, methods=["GET"], name=_NAME),
            Route(f"{prefix}/models", models.listed, methods=["GET"], name=_NAME),
            Route(f"{prefix}/models/{{model_name:path}}", models.one, methods=["GET"], name=_NAME),
        ]
        host.add_routes(routes)


class OpenAIModels:
    """Answers from MLServer's registry. Each model is listed once, with its default version."""

    def __init__(self, registry: MultiModelRegistry, options: ServerOptions) -> None:
        self._registry = registry
        self._options = options

    async def listed(self, request: Request) -> JSONResponse:
        """Answers ``GET /v1/models``: every model that generates tokens, and its LoRA adapters."""
        models = [model for model in default_models(self._registry) if isinstance(model, TokenModel)]
        shown = [shown_model(model) for model in models]
        shown += [shown_adapter(model, name) for model in models for name in sorted(model.adapter_names)]
        return openai_answer(request, 200, {"object": "list", "data": shown})

    async def one(self, request: Request) -> JSONResponse:
        """Answers ``GET /v1/models/{name}``, for a model, an alias or a LoRA adapter."""
        name = name_of_alias(self._registry, self._options, request.path_params["model_name"])
        model: Any = find_model(self._registry, name, None)
        if isinstance(model, HandlerModel):
            ready = bool(model.ready)
            return JSONResponse({"name": name, "ready": ready}, 200 if ready else NotServing.status)
        if model is None and (owner := find_adapter(self._registry, name)) is not None:
            return openai_answer(request, 200, shown_adapter(owner, name))
        if not isinstance(model, TokenModel):
            return openai_answer(request, *OPENAI_CHAT.refusal(UnknownModel(name)))
        return openai_answer(request, 200, shown_model(model))


async def _document(request: Request) -> JSONResponse:
    return openai_answer(request, 200, openai_document())


def shown_model(model: TokenModel) -> dict[str, Any]:
    """Returns a model as ``/v1/models`` lists it."""
    shown = {"id": model.name, "object": "model", "created": model.created, "owned_by": _OWNER}
    with suppress(NotServing):
        info = model.generator(EndpointKind.REST_UNARY).info
        shown |= {"max_model_len": info.max_model_len, "has_chat_template": info.has_chat_template}
    return shown


def shown_adapter(model: TokenModel, name: str) -> dict[str, Any]:
    """Returns an adapter as vLLM lists it, with the model as its parent."""
    return {**shown_model(model), "id": name, "root": name, "parent": model.name}


def openai_answer(request: Request, status: int, body: dict[str, Any]) -> JSONResponse:
    """Returns a JSON response with the headers of OpenAI's API."""
    request_id = OPENAI_CHAT.request_id({}, request.headers) or str(uuid4())
    return JSONResponse(body, status, dict(OPENAI_CHAT.headers(request_id)))


_OURS = "torch_stream:"  # the names of our routes begin with it
_KSERVE_V1 = re.compile(r"/v1/models/(.+):(predict|explain)")


def add_fallback_routes(host: ServerHost) -> None:
    """Adds the answers to unknown paths.

    Called once for a server, before any other route is added, because routes that are added later match first.
    """
    host.add_routes([_UnknownRoute(prefix, host.router, host.registry) for prefix in OPENAI_PREFIXES])


class _UnknownRoute(SelectiveRoute):
    """Answers paths below its prefix that no other route has."""

    def __init__(self, prefix: str, router: Router, registry: MultiModelRegistry) -> None:
        super().__init__(f"{prefix}/{{rest:path}}", self._answer)
        self.methods = None  # every method; in the constructor None would mean GET
        self._router = router
        self._registry = registry

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        """Declines a path that ends with a slash, because starlette redirects it to the path without the slash."""
        rest = path["rest"]
        return bool(rest) and not rest.endswith("/") and all(map(_is_ours, self._other_routes(scope)))

    def _other_routes(self, scope: Scope) -> list[BaseRoute]:
        """Returns the other routes that match the path. If they are ours, they are for other methods; otherwise they
        would have matched first.
        """
        routes = [each for each in self._router.routes if not isinstance(each, _UnknownRoute)]
        return [each for each in routes if each.matches(scope)[0] is not Match.NONE]

    async def _answer(self, request: Request) -> JSONResponse:
        path = request.scope["path"]
        if self._is_foreign(path):
            raise HTTPException(404)
        routes = self._other_routes(request.scope)
        allowed = sorted({method for route in routes for method in getattr(route, "methods", ())})
        if not allowed:
            message = f"{path} is not implemented by this runtime; the paths are {', '.join(self._paths())}"
            return openai_answer(request, 404, {"error": error_object(404, message, code="unknown_url")})
        message = f"{path} accepts {' and '.join(allowed)}, got {request.method}"
        response = openai_answer(request, 405, {"error": error_object(405, message, code="method_not_supported")})
        response.headers["allow"] = ", ".join(allowed)
        return response

    def _paths(self) -> list[str]:
        """Returns the paths below the prefix, sorted."""
        paths = {getattr(each, "path", "") for each in self._router.routes if _is_ours(each)}
        below = (each for each in paths if each.startswith(self._prefix) and each != self.path)
        return sorted(each.replace(":path}", "}") for each in below)

    def _is_foreign(self, path: str) -> bool:
        """Whether the path is KServe's path of another runtime's model, for which MLServer answers 404."""
        named = _KSERVE_V1.fullmatch(path)
        model = find_model(self._registry, named[1], None) if named else None
        return model is not None and not is_ours(model)


def _is_ours(route: BaseRoute) -> bool:
    return str(getattr(route, "name", "")).startswith(_OURS)
