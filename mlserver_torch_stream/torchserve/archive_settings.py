"""Names a model by its archive, and makes the content of its model-settings.json.

Knows nothing of where the archive comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.torchserve.archive import Archive, manifest_and_yaml, open_archive
from mlserver_torch_stream.torchserve.unpacking import DEFAULT_BOUNDS

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_USUAL_VERSION = "1.0"  # of an archive that has none, in TorchServe
_ENDING = re.compile(r"\.(mar|tgz|tar\.gz)$")
_IMPLEMENTATION = "mlserver_torch_stream.TorchServeRuntime"


def model_name(archive: Archive, given: str | None, file_name: str) -> str:
    """The given name, else the archive's, else that of its file. Raises SettingsError."""
    chosen = given or str(archive.model.get("modelName") or _ENDING.sub("", file_name))
    if not _NAME.fullmatch(chosen):
        raise SettingsError(f"{chosen!r} is not a valid name for a model: give another one with --name")
    return chosen


def model_version(archive: Archive) -> str | None:
    return None if (found := archive.model.get("modelVersion")) is None else str(found)


def read_named(path: Path, given: str | None) -> tuple[str, str, Mapping[str, Any]]:
    """The name, the version and the YAML of the model of an archive, of which nothing else is unpacked.

    ``given``: the model's name; None for the archive's. Raises SettingsError or LoadFailed.
    """
    archive = open_archive(str(path), None, DEFAULT_BOUNDS, manifest_and_yaml)
    archive.close()  # the manifest and the YAML are read
    version = model_version(archive) or _USUAL_VERSION
    if not _NAME.fullmatch(version):
        raise SettingsError(f"{version!r} is not a version of a model")
    return model_name(archive, given, path.name), version, archive.yaml


def model_settings(name: str, uri: str, version: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a model-settings.json."""
    parameters: dict[str, Any] = {"uri": uri}
    if version is not None:
        parameters["version"] = version
    if extra:
        parameters["extra"] = dict(extra)
    return {"name": name, "implementation": _IMPLEMENTATION, "parameters": parameters}
