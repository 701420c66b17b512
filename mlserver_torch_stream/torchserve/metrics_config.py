"""Reads TorchServe's ``metrics.yaml``: the metrics that are in a handler's ``context.metrics`` from the start.

Knows nothing of values, or of how they are exported. The section ``model_metrics`` is for handlers. The section
``ts_metrics`` is for TorchServe: MLServer and the node exporter export those metrics under other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.model_source import find_path

MODEL_METRICS = "model_metrics"
_TYPES = ("counter", "gauge", "histogram")
_USUAL = ["ModelName", "Level"]
# The handlers' metrics in the file that TorchServe's package has.
DEFAULT: Mapping[str, Any] = {
    MODEL_METRICS: {
        "gauge": [{"name": name, "unit": "ms", "dimensions": _USUAL} for name in ("HandlerTime", "PredictionTime")]
    }
}


def read_metrics_config(given: str, folder: str | None, key: str) -> Mapping[str, Any]:
    """``given``: a file, relative to the settings' folder; ``key``: the setting that names it. Raises SettingsError."""
    path = find_path(given, folder)
    if path is None or not path.is_file():
        raise SettingsError(f"{key}: no such file: {given}")
    try:
        return {MODEL_METRICS: dict(_checked(yaml.safe_load(path.read_text(encoding="utf-8"))))}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"{key}: {path}: {error}") from None


def find_metrics_config(given: str, folder: str) -> Path:
    """The file that the key of config.properties names. Raises SettingsError."""
    read_metrics_config(given, folder, "config.properties: metrics_config")
    found = find_path(given, folder)
    assert found is not None
    return found


def _checked(document: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Metrics by type. Raises ValueError."""
    section = document.get(MODEL_METRICS) if isinstance(document, dict) else None
    if not section or not isinstance(section, dict):
        raise ValueError(f"has no {MODEL_METRICS}, which TorchServe needs: metrics by type")
    for kind, metrics in section.items():
        if kind not in _TYPES:
            raise ValueError(f"{MODEL_METRICS}.{kind}: the type of a metric is one of {', '.join(_TYPES)}")
        if not isinstance(metrics, list):
            raise ValueError(f"{MODEL_METRICS}.{kind}: must be a list of metrics")
        yield kind, [_metric(f"{MODEL_METRICS}.{kind}[{index}]", metric) for index, metric in enumerate(metrics)]


def _metric(place: str, metric: Any) -> dict[str, Any]:
    if not isinstance(metric, dict):
        raise ValueError(f"{place}: must have name, unit and dimensions")
    for key, kind in (("name", str), ("unit", str), ("dimensions", list)):
        if not isinstance(metric.get(key), kind):
            raise ValueError(f"{place}.{key}: must be a {kind.__name__}, got {metric.get(key)!r}")
    if not all(isinstance(each, str) for each in metric["dimensions"]):
        raise ValueError(f"{place}.dimensions: must be a list of names, got {metric['dimensions']!r}")
    return {key: metric[key] for key in ("name", "unit", "dimensions")}
