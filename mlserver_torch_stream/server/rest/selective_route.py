"""A route that takes a request only if its path and method match and a condition of the route holds.

The routes that follow it, MLServer's own among them, get all other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.routing import Match, Route
from starlette.types import Scope


class SelectiveRoute(Route):
    """``methods`` None: every method if the endpoint is an ASGI application, else GET.

    The beginning of a path is compared before its pattern: with all its routes a server has dozens of patterns.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], methods: list[str] | None = None) -> None:
        super().__init__(path, endpoint, methods=methods, name=f"torch_stream:{path}")
        self._prefix = path.partition("{")[0]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["path"].startswith(self._prefix) or scope.get("root_path"):
            match, child = super().matches(scope)
            if match is Match.FULL and self.takes(scope, child["path_params"]):
                return match, child
        return Match.NONE, {}

    def takes(self, scope: Scope, path: Mapping[str, str]) -> bool:
        """``path``: the parameters of the path."""
        return True
