"""Reads the settings of a model's workers: their interpreter, the ``ts`` that they import, and their first metrics.

Knows nothing of archives. ``parameters.extra`` alone has these keys; TorchServe's own YAML does not.
"""

from __future__ import annotations

import os
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

    ``envelope``: the server's, which beats the archive's; empty for the archive's. ``handler``: likewise.
    """

    ts: str = "auto"
    python: str | None = None
    envelope: str = ""
    handler: str = ""
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
        _text(extra, "service_envelope", "the name of an envelope") or "",
        _text(extra, "handler", "handler.py[:function]") or "",
        DEFAULT if metrics is None else read_metrics_config(metrics, folder, key),
    )


def _text(extra: Mapping[str, Any], key: str, what: str) -> str | None:
    value = extra.get(key)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"parameters.extra.{key}: must be {what}, got {value!r}")
    return value or None
