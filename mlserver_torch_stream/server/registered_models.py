"""Tells models of this package from other runtimes' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlserver import MLModel
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.host import find_model
from mlserver_torch_stream.server.rest.prediction_errors import NoSuchModel, NoSuchVersion


def is_ours(model: MLModel | None) -> bool:
    return bool(getattr(model, "streams_tokens", False))


def find_accepted(
    registry: MultiModelRegistry, name: str, version: str | None, accepts: Callable[[MLModel | None], bool]
) -> Any:
    """The model. Raises NoSuchModel, also if it is not accepted, and NoSuchVersion if the name has other versions."""
    model = find_model(registry, name, version)
    if accepts(model):
        return model
    if model is not None or version is None or not accepts(find_model(registry, name, None)):
        raise NoSuchModel(name)
    raise NoSuchVersion(name, version)


def no_handler(name: str, path: str = "/v1/chat/completions") -> InvalidInput:
    """The error of a request that needs a handler, to a model that generates tokens. ``path``: one that it answers."""
    message = f"{name} generates tokens and runs no TorchServe handler: ask it at {path} or /v2/models/{name}/generate"
    return InvalidInput("model", message)
