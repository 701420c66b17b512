"""Finds the place of a model's files from its ``uri`` or name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlserver_torch_stream.errors import SettingsError

ENV_ROOTS = "MLSERVER_TORCH_STREAM_MODEL_ROOTS"  # folders, separated as in PATH; an empty value allows any folder
EMBEDDED_SCHEME = "embedded://"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # of a folder's model, apart from GGUF files


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model: a folder with a ``config.json``, a GGUF file, a hub id, or the name of an embedded model."""

    kind: Literal["folder", "gguf", "hub", "embedded"]
    location: str

    @property
    def name(self) -> str:
        return Path(self.location).stem if self.kind == "gguf" else Path(self.location).name


def is_hub_id(name: str) -> bool:
    """Returns whether a name, perhaps with ``hf://``, can be that of a repository of the hub."""
    return _HUB_NAME.fullmatch(name.removeprefix("hf://")) is not None


def find_path(path: str, source_folder: str | None) -> Path | None:
    """Returns the existing path: relative to the settings' folder, else to the working directory; None if there is
    none.

    Raises SettingsError if the path, with symbolic links resolved, is in none of the operator's roots.
    """
    candidates = [Path(path).expanduser()]
    if source_folder is not None:
        candidates.insert(0, Path(source_folder, path))
    found = next((each.resolve() for each in candidates if each.exists()), None)
    roots = [Path(root).resolve() for root in os.environ.get(ENV_ROOTS, "").split(os.pathsep) if root]
    if found is not None and roots and not any(found.is_relative_to(root) for root in roots):
        raise SettingsError(f"{path} is not in any folder of {ENV_ROOTS}")
    return found


def resolve_source(uri: str, source_folder: str | None = None) -> ModelSource:
    """Returns the model that ``uri`` names. Raises SettingsError if it names none."""
    if uri.startswith(EMBEDDED_SCHEME):
        return ModelSource("embedded", uri.removeprefix(EMBEDDED_SCHEME).strip("/"))
    if uri.startswith("hf://"):
        hub_id = uri.removeprefix("hf://").strip("/")
        if not _HUB_NAME.fullmatch(hub_id):
            raise SettingsError(f"parameters.uri: {uri!r} is not a hub id; write hf://org/name")
        return ModelSource("hub", hub_id)
    if "://" in uri and not uri.startswith("file://"):
        raise SettingsError(
            f"parameters.uri: unknown scheme in {uri!r}; the schemes are embedded://, hf:// and file://"
        )

    plain = uri.removeprefix("file://")
    found = find_path(plain, source_folder)
    if found is None:
        if _HUB_ID.fullmatch(plain) and not plain.endswith(".gguf"):
            return ModelSource("hub", plain)
        raise SettingsError(f"parameters.uri: no such file or folder: {plain}; a hub id is written org/name")
    return _folder_source(found) if found.is_dir() else _file_source(found)


def _file_source(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise SettingsError(f"parameters.uri: {path} is neither a folder nor a .gguf file")
    return ModelSource("gguf", str(path))


def _folder_source(folder: Path) -> ModelSource:
    files = sorted(folder.glob("*.gguf"))
    # A repository of GGUF files can have a config.json, too.
    has_weights = not files or any(path.suffix in _WEIGHTS for path in folder.iterdir())
    if (folder / "config.json").is_file() and has_weights:
        return ModelSource("folder", str(folder))
    if len(files) == 1:
        return ModelSource("gguf", str(files[0]))
    if files:
        names = ", ".join(file.name for file in files)
        raise SettingsError(f"parameters.uri: several .gguf files in folder {folder} ({names}): name one of them")
    raise SettingsError(f"no model in folder {folder}: expected config.json or one .gguf file; set parameters.uri")
