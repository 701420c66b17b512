"""OpenAI's paths below ``/predictions/{model}``, which clients of TorchServe's LLM launcher use, for models of tokens.

Knows nothing of handlers, which read such paths themselves.
"""

from __future__ import annotations

from typing import Any

from mlserver.handlers import DataPlane
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spellings import RestRoute
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.registered_models import no_handler
from mlserver_torch_stream.server.rest.endpoints import Endpoint
from mlserver_torch_stream.server.rest.openai_models import openai_answer, shown_model
from mlserver_torch_stream.server.rest.prediction_errors import NoSuchPath, WrongMethod
from mlserver_torch_stream.server.rest.prediction_path import PredictionPath

_MODELS = "v1/models"


class TokenPredictions:
    """Answers requests whose path names a model that generates tokens. The model that the body names is ignored."""

    def __init__(self, data_plane: DataPlane, options: ServerOptions) -> None:
        self._endpoints = {
            path.lstrip("/"): Endpoint(data_plane, options, RestRoute(path, None, (spelling,)))
            for path, spelling in OPENAI_SPELLINGS.items()
        }

    async def serve(self, path: PredictionPath, model: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError."""
        endpoint = self._endpoints.get(path.rest)
        if path.rest == _MODELS:
            shown = {"object": "list", "data": [shown_model(model)]}
            await openai_answer(Request(scope), 200, shown)(scope, receive, send)
        elif endpoint is not None and scope["method"] == "GET":
            raise WrongMethod
        elif endpoint is not None:
            named = {"model_name": path.name, "model_version": path.version}
            await endpoint({**scope, "path_params": named}, receive, send)
        elif path.rest:
            raise NoSuchPath(path.rest, self.paths(path.name))
        else:
            raise no_handler(path.name, self.paths(path.name)[0])

    def paths(self, name: str) -> tuple[str, ...]:
        return tuple(f"/predictions/{name}/{rest}" for rest in self._endpoints)
