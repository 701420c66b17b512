"""Answers requests below ``/v1`` whose path or method no route takes, with OpenAI's error object.

Knows no path of OpenAI's API. Paths of other runtimes' models are left to MLServer, also KServe's V1 path, which
MLServer does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlserver.registry import MultiModelRegistry
from mlserver.rest.server import RESTServer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match, Router
from starlette.types import Scope

from mlserver_torch_stream.protocol.openai_error import error_object
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.registered_models import find_model, is_ours
from mlserver_torch_stream.server.rest.openai_models import openai_answer
from mlserver_torch_stream.server.rest.selective_route import SelectiveRoute

_OURS = "torch_stream:"  # the names of our routes begin with it
_KSERVE_V1 = re.compile(r"/v1/models/(.+):(predict|explain)")


def add_routes(server: RESTServer) -> None:
    """Called once for a server, before any other route of this package is added: later routes come before earlier
    ones."""
    router, registry = server._app.router, server._data_plane._model_registry
    router.routes[:0] = [_UnknownRoute(prefix, router, registry) for prefix in OPENAI_PREFIXES]


class _UnknownRoute(SelectiveRoute):
    """Takes the paths below its prefix that no other route takes."""

    def __init__(self, prefix: str, router: Router, registry: MultiModelRegistry) -> None:
        super().__init__(f"{prefix}/{{rest:path}}", self._answer)
        self.methods = None  # all of them; starlette takes None in its constructor for GET
        self._router = router
        self._registry = registry

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        """A path that ends with a slash is left to starlette, which redirects it to the one without."""
        rest = path["rest"]
        return bool(rest) and not rest.endswith("/") and all(map(_is_ours, self._other_routes(scope)))

    def _other_routes(self, scope: Scope) -> list[BaseRoute]:
        """The routes of the path; if they are ours, they take other methods, since a route that matches comes first."""
        routes = [each for each in self._router.routes if not isinstance(each, _UnknownRoute)]
        return [each for each in routes if each.matches(scope)[0] is not Match.NONE]

    async def _answer(self, request: Request) -> JSONResponse:
        path = request.scope["path"]
        if self._is_foreign(path):
            raise HTTPException(404)
        routes = self._other_routes(request.scope)
        allowed = sorted({method for route in routes for method in getattr(route, "methods", ())})
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
