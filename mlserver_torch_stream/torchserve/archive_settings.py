"""Turns an archive, a name and settings into the content of a model-settings.json.

Knows nothing of where the archive comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.torchserve.archive import Archive

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
USUAL_VERSION = "1.0"  # of an archive that has none, in TorchServe
_ENDING = re.compile(r"\.(mar|tgz|tar\.gz)$")
_IMPLEMENTATION = "mlserver_torch_stream.TorchServeRuntime"


def model_name(archive: Archive, given: str | None, file_name: str) -> str:
    """The given name, else the archive's, else that of its file. Raises SettingsError."""
    chosen = given or str(archive.model.get("modelName") or _ENDING.sub("", file_name))
    if not NAME.fullmatch(chosen):
        raise SettingsError(f"{chosen!r} is not a valid name for a model: give another one with --name")
    return chosen


def model_version(archive: Archive) -> str | None:
    return None if (found := archive.model.get("modelVersion")) is None else str(found)


def model_settings(name: str, uri: str, version: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a model-settings.json."""
    parameters: dict[str, Any] = {"uri": uri}
    if version is not None:
        parameters["version"] = version
    if extra:
        parameters["extra"] = dict(extra)
    return {"name": name, "implementation": _IMPLEMENTATION, "parameters": parameters}
