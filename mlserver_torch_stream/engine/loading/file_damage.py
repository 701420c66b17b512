"""Reads the headers of weight files, and finds out which of a model's files is damaged.

No weights are read. The search for damage runs only after a load has failed. If a header contradicts itself or the
file's size, an error is raised that names the file.
"""

from __future__ import annotations

import gc
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.settings_file import read_json

# The largest header of one file: 100,000 tensors with the usual names, as a mixture of experts in four bits has.
# Parsing JSON holds the interpreter's lock, and all streams wait meanwhile.
MAX_HEADER_BYTES = 2**24
FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_BITS = {**FLOATS, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
         "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64,
         "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. ``dtype`` is the name that safetensors uses, such as ``BF16``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """The total size of the elements in bits, because an element can be smaller than a byte."""
        return self.elements * _BITS[self.dtype]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. Raises LoadFailed if the header is wrong, OSError if it cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
        if length > size - 8:
            raise LoadFailed(
                f"{file} is cut off, or is not a safetensors file: it has {size:,} bytes, too few for a "
                f"header of {length:,} bytes"
            )
        if length > MAX_HEADER_BYTES:
            raise LoadFailed(f"{file} has a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
        text = stream.read(length)
    with _without_collections():
        return _tensors(file, text, size)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switches off Python's garbage collector: at a header with 130,000 tensors, it stopped all threads for 0.6 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _tensors(file: Path, text: bytes, size: int) -> dict[str, StoredTensor]:
    try:
        header = json.loads(text)
        del header["__metadata__"]
    except KeyError:
        pass
    except (ValueError, RecursionError, TypeError) as error:
        raise LoadFailed(f"{file} is not a safetensors file: its header cannot be read") from error
    if not isinstance(header, dict):
        raise LoadFailed(f"{file} is not a safetensors file: its header cannot be read")
    ends = [_end(file, name, entry) for name, entry in header.items()]
    whole = 8 + len(text) + max(ends, default=0)
    if size != whole:
        raise LoadFailed(f"{file} is cut off or damaged: it has {size:,} bytes in place of {whole:,}")
    return {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _end(file: Path, name: str, entry: Any) -> int:
    """Returns the offset at which the tensor's bytes end.

    Raises LoadFailed if the tensor's entry contradicts itself.
    """
    if not isinstance(entry, Mapping):
        raise LoadFailed(f"{file} is damaged: the entry of {name!r} in its header is not an object")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise LoadFailed(f"{file}: tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not (_are_sizes(shape) and _are_sizes(place) and len(place) == 2):
        raise LoadFailed(
            f"{file} is damaged: the shape or data_offsets of {name!r} in its header is not a list of sizes"
        )
    if 8 * (place[1] - place[0]) != StoredTensor(dtype, tuple(shape)).bits:
        raise LoadFailed(
            f"{file} is damaged: {name!r} has {place[1] - place[0]:,} bytes, which do not fit {dtype} of shape {shape}"
        )
    return place[1]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def find_damage(place: Path) -> str | None:
    """Describes the damage of a file, or of the first damaged file of a folder; None if no file is damaged."""
    files = [place] if place.is_file() else sorted(path for path in place.glob("*") if path.is_file())
    return next((damage for file in files if (damage := damage_of(file)) is not None), None)


def damage_of(file: Path) -> str | None:
    """Describes the damage of a file; None if the file is undamaged or its kind is unknown."""
    check = _CHECKS.get(file.suffix)
    if check is None:
        return None
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_LFS_POINTER))
        if not begin:
            return f"{file} is empty"
        if begin == _LFS_POINTER:
            return f"{file} is a Git LFS pointer to the real file: run 'git lfs pull' in its folder"
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
            return f"{file} is not a GGUF file: it does not begin with 'GGUF'"
    from mlserver_torch_stream.engine.loading.gguf_file import BoundedReader

    try:
        BoundedReader(str(file))
    except Exception:  # the reader raises various errors for a file that ends too early
        return f"{file} is cut off or damaged: its {file.stat().st_size:,} bytes do not match its header"
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
