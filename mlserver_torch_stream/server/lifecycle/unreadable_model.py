"""A model whose settings or archive cannot be read. Its load fails, and the error names the file, line and key."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlserver import MLModel, ModelSettings
from mlserver.logging import logger
from mlserver.repository.load import load_model_settings
from mlserver.settings import ModelParameters
from pydantic import ValidationError

import mlserver_torch_stream
from mlserver_torch_stream.did_you_mean import did_you_mean_or_known, nearest_name
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.server import patches
from mlserver_torch_stream.server.host import source_of
from mlserver_torch_stream.server.state import server_state
from mlserver_torch_stream.server.status import ModelNotLoaded
from mlserver_torch_stream.settings import SETTINGS_FILE
from mlserver_torch_stream.settings_file import place_of, read_settings_file

_PACKAGE = mlserver_torch_stream.__name__


class UnreadableModel(MLModel):  # type: ignore[misc]
    """A model whose load fails; the reason is in its settings."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        patches.keep_out_of_workers(settings)

    async def load(self) -> bool:
        why = str(self.settings.parameters.extra["why"])
        logger.error(f"Cannot load model '{self.name}': {log_text(why)}")
        raise ModelNotLoaded(why)


class UnknownRuntime(UnreadableModel):
    """A model whose settings, read by MLServer's own repository, name a runtime that this package does not have."""

    def __init__(self, settings: ModelSettings) -> None:
        patches.install(server_state())
        super().__init__(settings)

    async def load(self) -> bool:
        path = Path(source_of(self.settings) or SETTINGS_FILE)
        try:
            _refuse_unknown_runtime(path, {"implementation": self.settings.implementation_})
        except SettingsError as error:
            self.settings.parameters = ModelParameters(extra={"why": str(error)})
        return await super().load()


def readable_or_not(path: Path) -> ModelSettings:
    """Returns the file's settings or, if it cannot be read, the settings of an ``UnreadableModel`` with the folder's
    name.
    """
    try:
        _refuse_unknown_runtime(path, read_settings_file(path))
        return load_model_settings(str(path))
    except SettingsError as error:
        why = str(error)
    except ValidationError as error:
        why = complaint(error, path)
    return ModelSettings(**unreadable_settings(path.parent.name, why))


def unreadable_settings(name: str, why: str) -> dict[str, Any]:
    """Returns the content of a model-settings.json for a model whose load fails with the reason ``why``."""
    runtime = f"{UnreadableModel.__module__}.{UnreadableModel.__name__}"
    return {"name": name, "implementation": runtime, "parameters": {"extra": {"why": why}}}


def complaint(error: ValidationError, path: Path) -> str:
    """Describes the first error in a file: the line, the key, the message and the wrong value."""
    first = error.errors()[0]
    keys = [str(part) for part in first["loc"]]
    if first["type"] == "missing":
        return f"{path}: {'.'.join(keys)} is missing"
    return f"{place_of(keys[-1], path)}: {'.'.join(keys)}: {first['msg']}, got {first['input']!r}"


def _refuse_unknown_runtime(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises SettingsError if the settings name a runtime that this package does not have, or misspell the package's
    name.
    """
    given = str(settings.get("implementation", ""))
    package, root = given.rpartition(".")[0], given.partition(".")[0]
    known = [f"{_PACKAGE}.{name}" for name in mlserver_torch_stream.__all__ if name.endswith("Runtime")]
    misspelt = nearest_name(root, [_PACKAGE], 0.8) not in (None, root) and find_spec(root) is None
    if given not in known and (misspelt or _PACKAGE in (package, given)):
        hint = did_you_mean_or_known(given, known, str)
        raise SettingsError(f"{place_of('implementation', path)}: no runtime {given}{hint}")
