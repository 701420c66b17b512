"""Reads a file of settings, which is one JSON object; its errors name the file, the line and the key."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import SettingsError

_KEY_OF_ERROR = re.compile(r"parameters(?:\.extra)?(?:\.(\w+)|: unknown key '([^']+)')")


def read_settings_file(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises SettingsError if the file does not contain one."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: must contain a JSON object, not {json.dumps(value)[:40]}")
    return value


def read_json(path: Path) -> Any:
    """Returns the JSON value in a file. Raises SettingsError if the file cannot be read or is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8") from None
    if not text.strip():
        raise SettingsError(f"{path}: is empty; it must contain a JSON object")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{path}, line {error.lineno}, column {error.colno}: {_complaint(error)}") from None
    except RecursionError:
        raise SettingsError(f"{path}: is nested too deeply") from None


def refuse_stray_keys(path: Path, known: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Refuses a key at the top level that MLServer would ignore, if the key belongs elsewhere in the file or is a
    misspelt known key.

    ``elsewhere`` maps keys that are known in other places to these places. Raises SettingsError for a refused key, or
    if the file cannot be read.
    """
    for key in read_settings_file(path):
        if key in known:
            continue
        if key in elsewhere:
            raise SettingsError(f"{place_of(key, path)}: {key!r} belongs in {elsewhere[key]}")
        if hint := did_you_mean(key, (*known, *elsewhere)):
            raise SettingsError(f"{place_of(key, path)}: unknown key {key!r}{hint}")


def place_of(key: str, path: Path) -> str:
    """Returns the file's path, with the line of the key if the key occurs exactly once."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if f'"{key}"' in line]
    return f"{path}, line {found[0]}" if len(found) == 1 else str(path)


def place_of_error(error: SettingsError, source: str | None) -> str:
    """Returns, in parentheses, the place of the key that a SettingsError names; an empty string if the file does not
    have the key.
    """
    key = _KEY_OF_ERROR.match(str(error))
    if source is None or key is None:
        return ""
    name = key[1] or key[2]
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return f" ({place_of(name, Path(source))})" if f'"{name}"' in text else ""


def _complaint(error: json.JSONDecodeError) -> str:
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if before.endswith(",") and after[:1] in ("}", "]"):
        return f"a comma before {after[0]!r}, where JSON allows none"
    if not after:
        return "the file ends before its JSON object does"
    return f"not JSON: {error.msg}"
