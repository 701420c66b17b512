"""Finds models in MLServer's registry, and tells those of this package from other runtimes' models.

Knows nothing of requests.
"""

from __future__ import annotations

from mlserver import MLModel
from mlserver.registry import MultiModelRegistry


def find_model(registry: MultiModelRegistry, name: str, version: str | None) -> MLModel | None:
    """The model that the registry's own ``get_model`` finds, but synchronously, as routes are matched."""
    versions = registry._models.get(name)
    return None if versions is None else versions._find_model(version)


def all_models(registry: MultiModelRegistry) -> list[MLModel]:
    """Every version of every model."""
    found: list[MLModel] = []
    for versions in registry._models.values():
        found += versions._versions.values()
        if versions.default is not None and not versions.default.version:
            found.append(versions.default)
    return found


def is_ours(model: MLModel | None) -> bool:
    return bool(getattr(model, "streams_tokens", False))
