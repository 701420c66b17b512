"""Reads the settings of a model's workers: their interpreter, the ``ts`` that they import, and their first metrics.

Knows nothing of archives. ``parameters.extra`` alone has these keys; TorchServe's own YAML does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.torchserve.interpreter import find_interpreter
from mlserver_torch_stream.torchserve.metrics_config import DEFAULT, read_metrics_config

_TS = ("auto", "shim", "package")
_ENV_METRICS = "TS_METRICS_CONFIG"  # TorchServe reads it if enable_envvars_config is true


@dataclass(frozen=True)
class WorkerSettings:
    """``python``: None for the server's own interpreter. ``metrics``: the content of a ``metrics.yaml``.

    ``envelope``: the server's, which beats the archive's; empty for the archive's. ``handler``: likewise. ``hidden``:
    matches the names of the server's variables that workers do not see.
    """

    ts: str = "auto"
    python: str | None = None
    envelope: str = ""
    handler: str = ""
    hidden: re.Pattern[str] | None = None
    limits_pixels: bool = True  # of images: what the handlers of TorchServe's own ask
    installs: bool = False  # the archive's requirements, into its unpacked folder
    metrics: Mapping[str, Any] = field(default_factory=lambda: DEFAULT)


def read_worker_settings(extra: Mapping[str, Any], folder: str | None) -> WorkerSettings:
    """``extra`` may have other keys. ``folder``: that of model-settings.json. Raises SettingsError."""
    which = extra.get("ts", "auto")
    if which not in _TS:
        raise SettingsError(f"parameters.extra.ts: must be one of {', '.join(_TS)}, got {which!r}")
    python = _text(extra, "python", "the path of a file")
    metrics, key = _text(extra, "metrics_config", "the path of a file"), "parameters.extra.metrics_config"
    if metrics is None:
        metrics, key = os.environ.get(_ENV_METRICS) or None, _ENV_METRICS
    return WorkerSettings(
        which,
        None if python is None else find_interpreter(python, folder),
        envelope=_text(extra, "service_envelope", "the name of an envelope") or "",
        handler=_text(extra, "handler", "handler.py[:function]") or "",
        hidden=_pattern(extra, "blacklist_env_vars"),
        limits_pixels=_flag(extra, "limit_max_image_pixels", True),
        installs=_flag(extra, "install_py_dep_per_model", False),
        metrics=DEFAULT if metrics is None else read_metrics_config(metrics, folder, key),
    )


def _flag(extra: Mapping[str, Any], key: str, default: bool) -> bool:
    value = extra.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"parameters.extra.{key}: must be true or false, got {value!r}")
    return value


def _pattern(extra: Mapping[str, Any], key: str) -> re.Pattern[str] | None:
    value = _text(extra, key, "a regular expression")
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        raise SettingsError(f"parameters.extra.{key}: {value!r} is not a regular expression: {error}") from None


def _text(extra: Mapping[str, Any], key: str, what: str) -> str | None:
    value = extra.get(key)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"parameters.extra.{key}: must be {what}, got {value!r}")
    return value or None
