"""What rank 0 tells the others to load, as JSON.

Knows nothing of how it travels.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.model_source import ModelSource
from mlserver_torch_stream.settings import EngineSettings, ResolvedSettings


def write_order(resolved: ResolvedSettings) -> dict[str, Any]:
    source = resolved.source
    return {
        "settings": resolved.settings.model_dump(mode="json"),
        "kind": source.kind,
        "location": source.location,
    }


def read_order(order: dict[str, Any]) -> ResolvedSettings:
    settings = EngineSettings.model_validate(order["settings"])
    return ResolvedSettings(settings, ModelSource(order["kind"], order["location"]), {})
