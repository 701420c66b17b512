"""Finds the archives of a model store that a TorchServe with this configuration would load at its start.

Knows nothing of what is in an archive. It downloads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.torchserve.archive import MANIFEST
from mlserver_torch_stream.torchserve.properties import MODEL_SNAPSHOT, settings_by_version

_ARCHIVES = (".mar", ".tar.gz", ".tgz")
_MAR, DEFAULT_VERSION = "marName", "defaultVersion"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One archive. ``name``, ``version``: None for the archive's own. ``given``: what a snapshot says of it."""

    path: Path
    name: str | None = None
    version: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        return self.given.get(DEFAULT_VERSION) is True


def stored_models(properties: Mapping[str, str]) -> list[StoredModel]:
    """Those of a snapshot, else of ``load_models``, else all of the store. There may be none. Raises SettingsError."""
    if "model_store" not in properties:
        raise SettingsError("no model_store: name it with --model-store or in config.properties")
    store = Path(properties["model_store"])
    if not store.is_dir():
        raise SettingsError(f"model_store: no such folder: {store}")
    if MODEL_SNAPSHOT in properties:
        return list(_of_snapshot(store, properties[MODEL_SNAPSHOT]))
    listed = properties.get("load_models", "all")
    if listed.lower() == "all":
        return [StoredModel(path) for path in sorted(store.iterdir()) if _is_archive(path)]
    return [] if listed.lower() == "none" else list(_listed(store, listed))


def _of_snapshot(store: Path, value: str) -> Iterator[StoredModel]:
    for name, versions in settings_by_version(MODEL_SNAPSHOT, value).items():
        for version, given in versions.items():
            place = f"{MODEL_SNAPSHOT}: {name} {version}"
            mar = given.get(_MAR)
            if not mar or not isinstance(mar, str):
                raise SettingsError(f"config.properties: {place}: has no {_MAR}")
            yield StoredModel(_in_store(store, mar, place), name, version, given)


def _listed(store: Path, value: str) -> Iterator[StoredModel]:
    for entry in filter(None, (each.strip() for each in value.split(","))):
        name, equals, file = entry.partition("=")
        yield StoredModel(_in_store(store, file if equals else name, "load_models"), name if equals else None)


def _in_store(store: Path, file: str, place: str) -> Path:
    if "://" in file:
        raise SettingsError(f"{place}: {file}: nothing is downloaded: put the archive into the model store")
    path = store / file
    if ".." in Path(file).parts or Path(file).is_absolute():
        raise SettingsError(f"{place}: {file} is not in the model store {store}")
    if not path.exists():
        raise SettingsError(f"{place}: no {file} in the model store {store}")
    return path


def _is_archive(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    return (path / MANIFEST).is_file() if path.is_dir() else path.name.endswith(_ARCHIVES)
