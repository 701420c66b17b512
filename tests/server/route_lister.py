"""A runtime that is not ours, with a custom handler that lists the routes of its application.

Copied into a test's folder, where MLServer finds it.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from mlserver import MLModel
from mlserver.handlers import custom_handler


class RouteLister(MLModel):  # type: ignore[misc]
    @custom_handler(rest_path="/routes", rest_method="GET")
    async def routes(self, request: Request) -> list[list[Any]]:
        """Returns each route as its path and its methods; a route without methods answers all."""
        return [[route.path, sorted(route.methods or ["GET", "POST"])] for route in request.app.routes]
