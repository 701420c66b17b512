"""The settings that every model takes from TorchServe's configuration, at the start and when it is registered.

Knows nothing of archives, nor of what is said of a model alone, except by the key ``models``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.torchserve.metrics_config import find_metrics_config
from mlserver_torch_stream.torchserve.properties import METRICS_CONFIG, carried
from mlserver_torch_stream.torchserve.server_properties import is_true, read_server_properties

# Keys of config.properties that are keys of parameters.extra, too.
_TEXTS, _FLAGS = ("service_envelope", "blacklist_env_vars"), ("limit_max_image_pixels", "install_py_dep_per_model")


class ModelDefaults:
    """``properties``: those of the server; ``file``: where they were read, None for TorchServe's own defaults.

    Raises SettingsError for a file of metrics that cannot be read.
    """

    def __init__(self, properties: Mapping[str, str], file: Path | None) -> None:
        self._properties = properties
        self._of_all: dict[str, Any] = {}
        if properties.get(METRICS_CONFIG):
            folder = str(file.parent if file is not None else Path.cwd())
            self._of_all[METRICS_CONFIG] = str(find_metrics_config(properties[METRICS_CONFIG], folder).absolute())
        self._of_all |= {key: properties[key] for key in _TEXTS if properties.get(key)}
        self._of_all |= {key: is_true(properties, key) for key in _FLAGS if key in properties}

    def extra(self, name: str, version: str, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of ``parameters.extra`` of a model, without those that its YAML has. Raises SettingsError."""
        return {**self._of_all, **carried(self._properties, name, version, yaml)}


def read_defaults(file: str) -> ModelDefaults:
    """``file``: the path of a config.properties, empty for none. Raises SettingsError."""
    path = Path(file).absolute() if file else None
    return ModelDefaults(read_server_properties(path, {}), path)
