"""Opens what a ``uri`` names, a ``.mar``, a ``.tar.gz``, a folder or a handler's file, as a folder on disk.

Opening an archive runs and installs nothing, and writes nothing outside the archive's own folder.
"""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.handlers.config.unpacking import (
    DEFAULT_BOUNDS,
    OwnFolder,
    UnpackBounds,
    Wanted,
    everything,
    unpack,
)
from mlserver_torch_stream.model_source import find_path

MANIFEST = "MAR-INF/MANIFEST.json"
ENDINGS = (".mar", ".tar.gz", ".tgz")
_CONFIG = "model-config.yaml"
_HANDLER_URI = re.compile(r"(?P<file>.+\.py)(?::(?P<function>\w+))?")
_MAX_MANIFEST_BYTES = 1 << 20
# RuntimeError: an encrypted zip, or (NotImplementedError) an unknown compression; ValueError: an impossible file name.
_UNREADABLE = (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, zlib.error)


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive. ``unpacked``: the folder that was made for it, which ``close`` removes."""

    folder: Path
    manifest: Mapping[str, Any]
    yaml: Mapping[str, Any]
    unpacked: OwnFolder | None = None

    @property
    def own(self) -> bool:
        return self.unpacked is not None

    @property
    def model(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.manifest["model"]
        return found

    @property
    def handler(self) -> str:
        return str(self.model["handler"])

    @property
    def requirements(self) -> str:
        """The path of the file in ``folder``, empty if there is none."""
        return str(self.model.get("requirementsFile") or "")

    @property
    def packed_requirements(self) -> str:
        """The path of the same file in the packed archive."""
        below = "." if self.unpacked is None else self.folder.relative_to(self.unpacked.path)
        return str(PurePosixPath(below, self.requirements))

    @property
    def envelope(self) -> str:
        """Empty if there is none."""
        return str(self.model.get("envelope") or "")

    def with_envelope(self, envelope: str) -> Archive:
        """The same archive with another envelope."""
        return replace(self, manifest={**self.manifest, "model": {**self.model, "envelope": envelope}})

    def close(self) -> None:
        if self.unpacked is not None:
            self.unpacked.remove()


def open_archive(
    uri: str, source_folder: str | None, bounds: UnpackBounds = DEFAULT_BOUNDS, wanted: Wanted = everything
) -> Archive:
    """``wanted``: the members that are unpacked; ``manifest_and_yaml`` is enough to describe a model.

    Raises SettingsError if the ``uri`` names nothing, LoadFailed if it is not a model archive of TorchServe.
    """
    plain = uri.removeprefix("file://")
    match = _HANDLER_URI.fullmatch(plain)
    path = find_path(match["file"] if match else plain, source_folder)
    if path is None:
        raise SettingsError(f"parameters.uri: no such archive, folder or handler: {plain}")
    if path.is_dir():
        return _read(path, path)
    if match:
        function = f":{match['function']}" if match["function"] else ""
        return _bare_handler(path, path.name + function)
    if path.name.endswith(ENDINGS):
        return _unpack(path, bounds, wanted)
    raise SettingsError(f"parameters.uri: {path} is not a .mar, .tar.gz, folder or handler.py[:function]")


def _bare_handler(path: Path, handler: str) -> Archive:
    model = {"modelName": path.stem, "handler": handler}
    if (path.parent / _CONFIG).is_file():
        model["configFile"] = _CONFIG
    try:
        return Archive(path.parent, {"model": model}, _read_yaml(path.parent, model))
    except LoadFailed as error:
        raise LoadFailed(f"{path}: {error}") from None


def manifest_and_yaml(name: str) -> bool:
    """The members of an archive that describe its model."""
    return f"/{name}".replace("\\", "/").endswith((f"/{MANIFEST}", ".yaml", ".yml"))


def _unpack(path: Path, bounds: UnpackBounds, wanted: Wanted) -> Archive:
    unpacked = None
    try:
        unpacked = OwnFolder()
        unpack(path, unpacked.path, bounds, wanted)
        return _read(_root(unpacked.path), path, unpacked)
    except BaseException as error:
        if unpacked is not None:
            unpacked.remove()
        if isinstance(error, _UNREADABLE):
            raise LoadFailed(f"cannot unpack {path}: {error}") from None
        raise


def _root(unpacked: Path) -> Path:
    """The folder of an archive's files. ``torch-model-archiver --archive-format tgz`` puts them below one folder."""
    below = [each.parent.parent for each in unpacked.glob(f"*/{MANIFEST}")]
    return below[0] if len(below) == 1 and not (unpacked / MANIFEST).is_file() else unpacked


def _read(folder: Path, source: Path, unpacked: OwnFolder | None = None) -> Archive:
    """``source``: what errors name. Raises LoadFailed."""
    try:
        manifest = _read_manifest(folder)
        return Archive(folder, manifest, _read_yaml(folder, manifest["model"]), unpacked)
    except (LoadFailed, OSError) as error:
        raise LoadFailed(f"{source}: {error}") from None


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise LoadFailed(f"no {MANIFEST}: it is not a model archive of TorchServe")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise LoadFailed(f"{MANIFEST}: larger than {_MAX_MANIFEST_BYTES} bytes")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LoadFailed(f"{MANIFEST}: not JSON: {error}") from None
    model = manifest.get("model") if isinstance(manifest, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("handler"), str):
        raise LoadFailed(f"{MANIFEST}: has no model.handler")
    runtime = manifest.get("runtime", "python")
    if runtime not in ("python", "python3"):
        raise LoadFailed(f"{MANIFEST}: the runtime {runtime!r} is not implemented, only python")
    return manifest


def _read_yaml(folder: Path, model: Mapping[str, Any]) -> Mapping[str, Any]:
    name = model.get("configFile")
    if name is None:
        return {}
    path = folder / PurePosixPath(str(name)).name
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:  # its text names the folder that the archive is unpacked into
        raise LoadFailed(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise LoadFailed(f"cannot read {name}: {' '.join(str(error).split())}") from None  # a YAML error has lines
    if found is not None and not isinstance(found, dict):
        raise LoadFailed(f"{name}: must be a mapping")
    return found or {}


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_USUAL_VERSION = "1.0"  # of an archive that has none, in TorchServe
_ENDING = re.compile(rf"({'|'.join(map(re.escape, ENDINGS))})$")
_IMPLEMENTATION = "mlserver_torch_stream.TorchServeRuntime"


def model_name(archive: Archive, given: str | None, file_name: str) -> str:
    """The given name, else the archive's, else that of its file. Raises SettingsError."""
    chosen = given or str(archive.model.get("modelName") or _ENDING.sub("", file_name))
    if not _NAME.fullmatch(chosen):
        raise SettingsError(f"{chosen!r} is not a valid name for a model: give another one with --name")
    return chosen


def model_version(archive: Archive) -> str | None:
    """Returns the version that the archive's manifest gives, or None."""
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
