"""Makes the version whose settings have ``defaultVersion`` the default version of a model, as TorchServe does.

Without a mark MLServer's registry decides: the newest version.
"""

from __future__ import annotations

import functools

from mlserver import MLModel
from mlserver.registry import SingleModelRegistry

DEFAULT_VERSION = "defaultVersion"  # a key of parameters.extra


def install() -> None:
    """Wraps the methods of MLServer's registry that choose a default. Called once."""
    refresh, find = SingleModelRegistry._refresh_default, SingleModelRegistry._find_default

    @functools.wraps(refresh)
    def refresh_default(registry: SingleModelRegistry, new_model: MLModel | None = None) -> MLModel | None:
        default = refresh(registry, new_model)
        if default is None or default.version:  # the registry has no other place for a model without a version
            registry._default = _marked(registry) or default
        return registry._default

    @functools.wraps(find)
    def find_default(registry: SingleModelRegistry) -> MLModel | None:
        return _marked(registry) or find(registry)

    SingleModelRegistry._refresh_default = refresh_default
    SingleModelRegistry._find_default = find_default


def mark(registry: SingleModelRegistry, default: MLModel) -> None:
    """Makes this version the default one, whichever versions are loaded later."""
    for model in registry._versions.values():
        parameters = model.settings.parameters
        if parameters is not None:  # a version is a parameter
            parameters.extra = {**(parameters.extra or {}), DEFAULT_VERSION: model is default}
    registry._refresh_default()


def _marked(registry: SingleModelRegistry) -> MLModel | None:
    return next((model for model in registry._versions.values() if _is_marked(model)), None)


def _is_marked(model: MLModel) -> bool:
    parameters = model.settings.parameters
    return parameters is not None and (parameters.extra or {}).get(DEFAULT_VERSION) is True
