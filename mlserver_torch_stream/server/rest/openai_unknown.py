"""Answers what no route below ``/v1`` takes, a path or a method, with OpenAI's error object.

Knows no path of OpenAI's API. Routes of other runtimes are left alone: also the one of KServe's V1 spelling, which
MLServer has not.
"""

from __future__ import annotations

import re

from mlserver.registry import MultiModelRegistry
from mlserver.rest.server import RESTServer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Scope

from mlserver_torch_stream.protocol.openai_error import error_object
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.lifecycle.readiness import is_ours
from mlserver_torch_stream.server.rest.openai_models import openai_answer
from mlserver_torch_stream.server.rest.routes import find_model

_OURS = "torch_stream:"  # the names of our routes begin with it
_KSERVE_V1 = re.compile(r"/v1/models/(.+):(predict|explain)")


def add_routes(server: RESTServer) -> None:
    """Called once for a server, before any other route of this package is added: later routes come before earlier
    ones."""
    router, registry = server._app.router, server._data_plane._model_registry
    router.routes[:0] = [_UnknownRoute(prefix, router, registry) for prefix in OPENAI_PREFIXES]


class _UnknownRoute(Route):
    """Matches the paths below its prefix for which no other route is."""

    def __init__(self, prefix: str, router: Router, registry: MultiModelRegistry) -> None:
        super().__init__(f"{prefix}/{{rest:path}}", self._answer, name=f"{_OURS}{prefix}")
        self.methods = None  # all of them; starlette takes None in its constructor for GET
        self._router = router
        self._registry = registry

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """A path that ends with a slash is left to starlette, which redirects it to the one without."""
        match, child = super().matches(scope)
        rest = child["path_params"]["rest"] if match is Match.FULL else ""
        if rest and not rest.endswith("/") and all(_is_ours(each) for each in self._others(scope)):
            return match, child
        return Match.NONE, {}

    def _others(self, scope: Scope) -> list[BaseRoute]:
        """The routes of the path; they take other methods if they are ours, since those that match come first."""
        others = [each for each in self._router.routes if not isinstance(each, _UnknownRoute)]
        return [each for each in others if each.matches(scope)[0] is not Match.NONE]

    async def _answer(self, request: Request) -> JSONResponse:
        path = request.scope["path"]
        if self._is_foreign(path):
            raise HTTPException(404)
        allowed = sorted({method for each in self._others(request.scope) for method in getattr(each, "methods", ())})
        if not allowed:
            message = f"{path} is not implemented by this runtime; use /v1/chat/completions"
            return openai_answer(request, 404, {"error": error_object(404, message, code="unknown_url")})
        message = f"{path} takes {' and '.join(allowed)}, got {request.method}"
        response = openai_answer(request, 405, {"error": error_object(405, message, code="method_not_supported")})
        response.headers["allow"] = ", ".join(allowed)
        return response

    def _is_foreign(self, path: str) -> bool:
        """True for KServe's path of another runtime's model, to which MLServer says that there is none."""
        named = _KSERVE_V1.fullmatch(path)
        model = find_model(self._registry, named[1], None) if named else None
        return model is not None and not is_ours(model)


def _is_ours(route: BaseRoute) -> bool:
    return str(getattr(route, "name", "")).startswith(_OURS)
