"""Finds the model that a request in TorchServe's spelling names, and refuses models that run no handler.

Knows nothing of requests.
"""

from __future__ import annotations

from typing import Any

from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.rest.prediction_errors import NoSuchModel, NoSuchVersion
from mlserver_torch_stream.server.registered_models import find_model, is_ours


def find_ours(registry: MultiModelRegistry, name: str, version: str | None) -> Any:
    """Returns the handler's model. Raises NoSuchModel, also for another runtime's model, and NoSuchVersion."""
    model = find_model(registry, name, version)
    if is_ours(model):
        return model
    if model is not None or version is None or not is_ours(find_model(registry, name, None)):
        raise NoSuchModel(name)
    raise NoSuchVersion(name, version)


def no_handler(name: str, path: str = "/v1/chat/completions") -> InvalidInput:
    """The error of a request that needs a handler, to a model that generates tokens. ``path``: one that it answers."""
    message = f"{name} generates tokens and runs no TorchServe handler: ask it at {path} or /v2/models/{name}/generate"
    return InvalidInput("model", message)
