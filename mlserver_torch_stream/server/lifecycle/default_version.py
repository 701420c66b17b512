"""Makes the version with ``defaultVersion`` in its settings the default version of a model, as in TorchServe.

If no version has this key, MLServer's registry chooses the newest version.
"""

from __future__ import annotations

from collections.abc import Callable

from mlserver import MLModel
from mlserver.registry import SingleModelRegistry

from mlserver_torch_stream.server.host import Hook, choose_default, set_default, versioned, wrap

DEFAULT_VERSION = "defaultVersion"  # a key of parameters.extra


def install() -> None:
    """Wraps the methods of MLServer's registry that choose a default. Called once."""
    wrap(Hook.REFRESH_DEFAULT, _refreshing)
    wrap(Hook.FIND_DEFAULT, _finding)


def _refreshing(refresh: Callable[..., MLModel | None]) -> Callable[..., MLModel | None]:
    def refresh_default(registry: SingleModelRegistry, new_model: MLModel | None = None) -> MLModel | None:
        default = refresh(registry, new_model)
        if default is None or default.version:  # a model without a version can only be the default
            default = _marked(registry) or default
            set_default(registry, default)
        return default

    return refresh_default


def _finding(find: Callable[..., MLModel | None]) -> Callable[..., MLModel | None]:
    def find_default(registry: SingleModelRegistry) -> MLModel | None:
        return _marked(registry) or find(registry)

    return find_default


def mark(registry: SingleModelRegistry, default: MLModel) -> None:
    """Makes this version the default, also after other versions are loaded later."""
    for model in versioned(registry):
        parameters = model.settings.parameters
        if parameters is not None:  # without parameters the model has no version
            parameters.extra = {**(parameters.extra or {}), DEFAULT_VERSION: model is default}
    choose_default(registry)


def _marked(registry: SingleModelRegistry) -> MLModel | None:
    return next((model for model in versioned(registry) if _is_marked(model)), None)


def _is_marked(model: MLModel) -> bool:
    parameters = model.settings.parameters
    return parameters is not None and (parameters.extra or {}).get(DEFAULT_VERSION) is True
