"""OpenAI's list of models, its object of one model, and the OpenAPI document of its endpoints.

Knows nothing of generation. Models of other runtimes, and handlers, which generate no tokens, are not listed; a path of
a handler answers with its readiness, as in KServe's V1 protocol, which has the same path.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import uuid4

from mlserver import MLModel
from mlserver.handlers import DataPlane
from mlserver.rest.server import RESTServer
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mlserver_torch_stream.errors import NotServing, UnknownModel
from mlserver_torch_stream.protocol.openai_document import openai_document
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.registered_models import find_model

_NAME = "torch_stream:models"
_OWNER = "mlserver-torch-stream"


def add_routes(server: RESTServer) -> None:
    """Puts the routes before MLServer's. Called once for a server."""
    models = OpenAIModels(server._data_plane)
    for prefix in OPENAI_PREFIXES:
        server._app.router.routes[:0] = [
            Route(f"{prefix}/openapi.json", _document, methods=["GET"], name=_NAME),
            Route(f"{prefix}/models", models.listed, methods=["GET"], name=_NAME),
            Route(f"{prefix}/models/{{model_name:path}}", models.one, methods=["GET"], name=_NAME),
        ]


class OpenAIModels:
    """Answers from MLServer's registry. Each name is listed once, with its default version."""

    def __init__(self, data_plane: DataPlane) -> None:
        self._data_plane = data_plane

    async def listed(self, request: Request) -> JSONResponse:
        defaults = [versions.default for _, versions in sorted(self._data_plane._model_registry._models.items())]
        shown = [shown_model(model) for model in defaults if hasattr(model, "generator")]
        return openai_answer(request, 200, {"object": "list", "data": shown})

    async def one(self, request: Request) -> JSONResponse:
        name = request.path_params["model_name"]
        model: Any = find_model(self._data_plane._model_registry, name, None)
        if hasattr(model, "open_prediction"):
            ready = bool(model.ready)
            return JSONResponse({"name": name, "ready": ready}, 200 if ready else NotServing.status)
        if not hasattr(model, "generator"):
            return openai_answer(request, *OPENAI_CHAT.refusal(UnknownModel(name)))
        return openai_answer(request, 200, shown_model(model))


async def _document(request: Request) -> JSONResponse:
    return openai_answer(request, 200, openai_document())


def shown_model(model: MLModel) -> dict[str, Any]:
    shown = {"id": model.name, "object": "model", "created": model.created, "owned_by": _OWNER}
    with suppress(NotServing):
        info = model.generator(EndpointKind.REST_UNARY).info
        shown |= {"max_model_len": info.max_model_len, "has_chat_template": info.has_chat_template}
    return shown


def openai_answer(request: Request, status: int, body: dict[str, Any]) -> JSONResponse:
    request_id = OPENAI_CHAT.request_id({}, request.headers) or str(uuid4())
    return JSONResponse(body, status, dict(OPENAI_CHAT.headers(request_id)))
