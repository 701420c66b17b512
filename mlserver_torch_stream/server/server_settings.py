"""Checks MLServer's ``settings.json``: its JSON, its values, its ports, and keys that MLServer ignores.

``mlserver start`` reads the file before it imports this package, so there this package can refuse only keys that
MLServer ignores.
"""

from __future__ import annotations

from pathlib import Path

from mlserver.settings import ModelSettings, Settings
from pydantic import ValidationError

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.settings import KNOWN_KEYS, SETTINGS_FILE
from mlserver_torch_stream.settings_file import place_of, read_settings_file, refuse_stray_keys

SERVER_SETTINGS_FILE = "settings.json"
MAX_PORT = 65535
_PORTS = ("http_port", "grpc_port", "metrics_port")
_ELSEWHERE = {
    **{key.rstrip("_"): SETTINGS_FILE for key in ModelSettings.model_fields},
    **{key: f"parameters.extra of {SETTINGS_FILE}" for key in KNOWN_KEYS},
}


def check_server_settings(folder: Path) -> None:
    """Checks settings.json in the folder, if the file exists, and MLServer's environment variables. Raises
    SettingsError.
    """
    path = folder / SERVER_SETTINGS_FILE
    given = read_settings_file(path) if path.is_file() else {}
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise SettingsError(f"{_origin(key, path, key in given)}: {first['msg']}, got {first['input']!r}") from None
    for key in _PORTS:
        port = getattr(settings, key)
        if not 0 <= port <= MAX_PORT:
            raise SettingsError(f"{_origin(key, path, key in given)}: must be a port from 0 to {MAX_PORT}, got {port}")
    refuse_ignored_keys(folder)


def refuse_ignored_keys(folder: Path) -> None:
    """Raises SettingsError for a key in the file that MLServer ignores because it belongs elsewhere or is misspelt."""
    path = folder / SERVER_SETTINGS_FILE
    if path.is_file():
        refuse_stray_keys(path, Settings.model_fields, _ELSEWHERE)


def _origin(key: str, path: Path, in_file: bool) -> str:
    return f"{place_of(key, path)}: {key}" if in_file else f"MLSERVER_{key.upper()}"
