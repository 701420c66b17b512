"""Finds out, after a load has failed, which of a model's files is damaged: cut off, a Git LFS pointer, no JSON.

Knows nothing of what the files mean. A load that succeeds reads no file for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mlserver_torch_stream.engine.loading.safetensors_header import read_header
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.settings_file import read_json

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def find_damage(place: Path) -> str | None:
    """Describes the damage of a file, or of the first damaged file of a folder; None if no file is damaged."""
    files = [place] if place.is_file() else sorted(path for path in place.glob("*") if path.is_file())
    return next((damage for file in files if (damage := damage_of(file)) is not None), None)


def damage_of(file: Path) -> str | None:
    """Describes the damage of a file; None for a whole file, or one of another kind."""
    check = _CHECKS.get(file.suffix)
    if check is None:
        return None
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_LFS_POINTER))
        if not begin:
            return f"{file} is empty"
        if begin == _LFS_POINTER:
            return f"{file} is a Git LFS pointer, which stands for the real file: run 'git lfs pull' in its folder"
        return check(file)
    except OSError as error:
        return f"{file} cannot be read: {os.strerror(error.errno or 0)}"


def _safetensors_damage(file: Path) -> str | None:
    try:
        read_header(file)
    except LoadFailed as error:
        return str(error)
    return None


def _gguf_damage(file: Path) -> str | None:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            return f"{file} is no GGUF file: it does not begin with 'GGUF'"
    import gguf

    try:
        gguf.GGUFReader(str(file))
    except Exception:  # the reader has no error of its own for a file that ends too early
        return f"{file} is cut off or damaged: its {file.stat().st_size:,} bytes do not hold what its header names"
    return None


def _json_damage(file: Path) -> str | None:
    try:
        read_json(file)
    except SettingsError as error:
        return str(error)
    return None


_CHECKS: Mapping[str, Callable[[Path], str | None]] = {
    ".safetensors": _safetensors_damage,
    ".gguf": _gguf_damage,
    ".json": _json_damage,
}
