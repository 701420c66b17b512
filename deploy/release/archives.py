"""Finds the archives of a release, one wheel for this machine and one sdist, and checks what they contain.

Knows nothing of installing them.
"""

from __future__ import annotations

import email
import platform
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

PACKAGE = "mlserver_torch_stream"
_CHECKOUT = Path(__file__).parents[2]
_SDIST_HAS = ("pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE", "README.md")
_NEEDED = ("Name", "Version", "Summary", "License-Expression", "License-File", "Requires-Python")


class BadArchive(Exception):
    """Raised if an archive is missing or has wrong contents. The message names the archive and the fault."""


@dataclass(frozen=True)
class Archives:
    wheel: Path
    sdist: Path


def package_files() -> list[str]:
    """Returns the paths of the package's files, code and data, which both archives must contain."""
    paths = sorted(path for path in (_CHECKOUT / PACKAGE).rglob("*") if path.is_file())
    return [str(path.relative_to(_CHECKOUT)) for path in paths if "__pycache__" not in path.parts]


def find_archives(folder: Path, version: str) -> Archives:
    """Returns the wheel for this machine and the sdist, both of this version. Raises BadArchive if one is missing."""
    tag = f"{PACKAGE}-{version}-py3-none-manylinux_2_28_{platform.machine()}.whl"
    archives = Archives(folder / tag, folder / f"{PACKAGE}-{version}.tar.gz")
    for path in (archives.wheel, archives.sdist):
        if not path.is_file():
            raise BadArchive(f"{folder} has no {path.name}")
    return archives


def check_contents(archives: Archives) -> None:
    """Raises BadArchive if an archive lacks a file or a metadata field that a release needs, or has compiled Python."""
    with zipfile.ZipFile(archives.wheel) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(wheel.read(metadata))
    _check(archives.wheel, names, package_files())
    if not any("/prebuilt/" in name and name.endswith(".so") for name in names):
        raise BadArchive(f"{archives.wheel.name} has no kernels that are compiled ahead of time")
    _check_fields(archives.wheel, fields)
    with tarfile.open(archives.sdist) as sdist:
        inside = [name.partition("/")[2] for name in sdist.getnames()]
        written = sdist.extractfile(f"{archives.sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert written is not None
        _check_fields(archives.sdist, email.message_from_bytes(written.read()))
    _check(archives.sdist, inside, [*_SDIST_HAS, *package_files()])


def _check(archive: Path, names: list[str], wanted: Sequence[str]) -> None:
    missing = [want for want in wanted if want not in names]
    strange = [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    if missing or strange:
        raise BadArchive(f"{archive.name}: missing files {missing}, files not wanted in it {strange[:3]}")


def _check_fields(archive: Path, fields: Message) -> None:
    missing = [field for field in _NEEDED if not fields.get(field)]
    if missing:
        raise BadArchive(f"{archive.name}: the metadata has no {', '.join(missing)}")
