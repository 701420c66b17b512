"""Reads a path of TorchServe's: the model, its version, and the rest of the path.

Knows nothing of what a path asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.server.registered_models import find_model

_API = "v1"


@dataclass(frozen=True, slots=True)
class PredictionPath:
    """``rest``: what TorchServe hands on to a handler as the header ``url_path``."""

    name: str
    version: str | None
    rest: str

    @classmethod
    def of(cls, parameters: Mapping[str, str], registry: MultiModelRegistry) -> PredictionPath:
        """As TorchServe reads it, but ``v1`` is no version where the model has none of this name and more follows."""
        name, version = parameters["model_name"], parameters.get("model_version")
        rest = parameters.get("url_path", "").rstrip("/")
        if version == _API and rest and find_model(registry, name, _API) is None:
            return cls(name, None, f"{_API}/{rest}")
        return cls(name, version, rest)
