"""Opens the model that a ``uri`` names, and provides its files in a folder on disk.

The ``uri`` names a ``.mar``, a ``.tar.gz``, a folder or a handler's Python file. Opening a model runs no code, installs
no package, and writes no file outside the folder that is made for the archive.
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
# zipfile raises RuntimeError for an encrypted member, its subclass NotImplementedError for an unknown compression, and
# ValueError for a file name that the file system cannot have.
_UNREADABLE = (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, zlib.error)


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive. ``unpacked`` is the folder that was made for its files, which ``close`` removes."""

    folder: Path
    manifest: Mapping[str, Any]
    yaml: Mapping[str, Any]
    unpacked: OwnFolder | None = None

    @property
    def own(self) -> bool:
        """True if ``folder`` was made for the archive, and ``close`` removes it."""
        return self.unpacked is not None

    @property
    def model(self) -> Mapping[str, Any]:
        """The ``model`` object of the manifest."""
        found: Mapping[str, Any] = self.manifest["model"]
        return found

    @property
    def handler(self) -> str:
        """The handler's entry point, as ``file[:function]`` or the name of one of TorchServe's handlers."""
        return str(self.model["handler"])

    @property
    def requirements(self) -> str:
        """The path of the requirements file, relative to ``folder``; an empty string if the manifest names none."""
        return str(self.model.get("requirementsFile") or "")

    @property
    def packed_requirements(self) -> str:
        """The path of the requirements file inside the packed archive."""
        below = "." if self.unpacked is None else self.folder.relative_to(self.unpacked.path)
        return str(PurePosixPath(below, self.requirements))

    @property
    def envelope(self) -> str:
        """The name of the request envelope in the manifest; an empty string if the manifest names none."""
        return str(self.model.get("envelope") or "")

    def with_envelope(self, envelope: str) -> Archive:
        """Returns a copy of this archive whose envelope is replaced."""
        return replace(self, manifest={**self.manifest, "model": {**self.model, "envelope": envelope}})

    def close(self) -> None:
        """Removes the folder that was made for the archive. Idempotent."""
        if self.unpacked is not None:
            self.unpacked.remove()


def open_archive(
    uri: str, source_folder: str | None, bounds: UnpackBounds = DEFAULT_BOUNDS, wanted: Wanted = everything
) -> Archive:
    """Opens the archive, folder or handler file that ``uri`` names, relative to ``source_folder``.

    ``wanted`` chooses the members to unpack; ``manifest_and_yaml`` is enough to describe a model. Raises SettingsError
    if the ``uri`` names no file, and LoadFailed if the file is not a model archive of TorchServe.
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
    """Whether the member of this name describes the model: the manifest or ``model-config.yaml``."""
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
    """Returns the folder of the archive's files: ``torch-model-archiver --archive-format tgz`` nests it one deeper."""
    below = [each.parent.parent for each in unpacked.glob(f"*/{MANIFEST}")]
    return below[0] if len(below) == 1 and not (unpacked / MANIFEST).is_file() else unpacked


def _read(folder: Path, source: Path, unpacked: OwnFolder | None = None) -> Archive:
    """Reads the manifest of an archive in ``folder``. Raises LoadFailed, which names ``source``."""
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
        raise LoadFailed(f"{MANIFEST}: the runtime {runtime!r} is not supported; only python is")
    return manifest


def _read_yaml(folder: Path, model: Mapping[str, Any]) -> Mapping[str, Any]:
    name = model.get("configFile")
    if name is None:
        return {}
    path = folder / PurePosixPath(str(name)).name
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:  # only strerror is shown: the whole text would name our temporary folder
        raise LoadFailed(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise LoadFailed(f"cannot read {name}: {' '.join(str(error).split())}") from None  # YAML's errors have lines
    if found is not None and not isinstance(found, dict):
        raise LoadFailed(f"{name}: must be a mapping")
    return found or {}


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_USUAL_VERSION = "1.0"  # TorchServe's version of a model whose archive names no version
_ENDING = re.compile(rf"({'|'.join(map(re.escape, ENDINGS))})$")
_IMPLEMENTATION = "mlserver_torch_stream.TorchServeRuntime"


def model_name(archive: Archive, given: str | None, file_name: str) -> str:
    """Chooses the model's name: ``given``, else the name in the manifest, else the file's name.

    Raises SettingsError if the name is not valid.
    """
    chosen = given or str(archive.model.get("modelName") or _ENDING.sub("", file_name))
    if not _NAME.fullmatch(chosen):
        raise SettingsError(f"{chosen!r} is not a valid name for a model: give another one with --name")
    return chosen


def model_version(archive: Archive) -> str | None:
    """Returns the version in the archive's manifest; None if the manifest has none."""
    return None if (found := archive.model.get("modelVersion")) is None else str(found)


def read_named(path: Path, given: str | None) -> tuple[str, str, Mapping[str, Any]]:
    """Returns the name, the version and ``model-config.yaml`` of an archive's model, without unpacking any other file.

    ``given`` is the model's name; with None the archive's own name is used. Raises SettingsError or LoadFailed.
    """
    archive = open_archive(str(path), None, DEFAULT_BOUNDS, manifest_and_yaml)
    archive.close()  # the manifest and the YAML are read
    version = model_version(archive) or _USUAL_VERSION
    if not _NAME.fullmatch(version):
        raise SettingsError(f"{version!r} is not a valid version of a model")
    return model_name(archive, given, path.name), version, archive.yaml


def model_settings(name: str, uri: str, version: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of the ``model-settings.json`` that serves the archive at ``uri``."""
    parameters: dict[str, Any] = {"uri": uri}
    if version is not None:
        parameters["version"] = version
    if extra:
        parameters["extra"] = dict(extra)
    return {"name": name, "implementation": _IMPLEMENTATION, "parameters": parameters}
