"""Tells which endpoints need no key: health, the page's files, and by the operator's choice metrics and the repository.

Knows nothing of keys. Every other path and method needs one, also for other runtimes' models.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

_REST_HEALTH = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
_REST_REPOSITORY = re.compile(r"/v2/repository/(index|models/[^/]+/(load|unload))")
_READING = ("GET", "HEAD")

_SERVICE = "/inference.GRPCInferenceService/"
_OLD_REPOSITORY = "/inference.model_repository.ModelRepositoryService/"
_GRPC_HEALTH = frozenset(f"{_SERVICE}{method}" for method in ("ServerLive", "ServerReady", "ModelReady"))
_GRPC_REPOSITORY = frozenset(
    f"{service}{method}"
    for service in (_SERVICE, _OLD_REPOSITORY)
    for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
)


@dataclass(frozen=True)
class OpenEndpoints:
    metrics: bool
    repository: bool
    page: Set[str] = frozenset()  # the paths of its files

    def rest(self, method: str, path: str, metrics_endpoint: str | None) -> bool:
        """Whether a REST path needs no key. ``path``: decoded, without the server's root path."""
        if method in _READING and (path in self.page or _REST_HEALTH.fullmatch(path)):
            return True
        if method in _READING and self.metrics and path == metrics_endpoint:
            return True
        return self.repository and _REST_REPOSITORY.fullmatch(path) is not None

    def grpc(self, method: str) -> bool:
        """``method`` with its service, as in ``/inference.GRPCInferenceService/ModelInfer``."""
        return method in _GRPC_HEALTH or (self.repository and method in _GRPC_REPOSITORY)
