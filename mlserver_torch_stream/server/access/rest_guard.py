"""Refuses HTTP requests without a key before anything of MLServer sees them, so that their bodies are not read.

Knows no route: it stands before the whole application.
"""

from __future__ import annotations

import re
from uuid import uuid4

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlserver_torch_stream.errors import Unauthorized
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT
from mlserver_torch_stream.protocol.spellings import OPENAI_PREFIXES
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.rest.prediction_errors import status_and_body
from mlserver_torch_stream.server.rest.refusal import send_json

_POLICY_VIOLATION = 1008  # a WebSocket that is closed before it is accepted is answered 403
_PREFLIGHT = ("origin", "access-control-request-method")
_TORCHSERVE = re.compile(r"/(predictions|explanations)/.*|/v1/models/[^/]+:(predict|explain)", re.DOTALL)


class RestGuard:
    """Middleware; ``metrics_endpoint`` is the path of the metrics, None where there are none.

    ``preflights``: whether the application answers a browser's preflights itself, which bear no key.
    """

    def __init__(
        self, app: ASGIApp, access: AccessControl, metrics_endpoint: str | None, preflights: bool = False
    ) -> None:
        self._app = app
        self._access = access
        self._metrics_endpoint = metrics_endpoint
        self._preflights = preflights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._passes(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(_path(scope), send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _passes(self, scope: Scope) -> bool:
        keys, headers = self._access.keys, Headers(scope=scope)
        if keys is None or keys.accept(headers.getlist("authorization")):
            return True
        if self._preflights and scope.get("method") == "OPTIONS" and all(name in headers for name in _PREFLIGHT):
            return True
        return self._access.open.rest(scope.get("method", ""), _path(scope), self._metrics_endpoint)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _refuse(path: str, send: Send) -> None:
    """Answers 401 in the spelling of the path."""
    error = Unauthorized()
    headers = [(b"www-authenticate", b"Bearer")]
    if _TORCHSERVE.fullmatch(path):
        status, body = status_and_body(error)
    elif path.startswith(tuple(f"{prefix}/" for prefix in OPENAI_PREFIXES)):
        status, spelled = OPENAI_CHAT.refusal(error)
        body = orjson.dumps(spelled)
        headers += [(name.encode(), value.encode()) for name, value in OPENAI_CHAT.headers(str(uuid4())).items()]
    else:
        status, body = error.status, orjson.dumps({"error": error.message})
    await send_json(send, status, body, headers)
