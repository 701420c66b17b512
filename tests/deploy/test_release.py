"""The parts of ``make release-check``: what it requires of archives, and what a new user's environment lacks."""

from __future__ import annotations

import io
import platform
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.release.archives import PACKAGE, BadArchive, check_contents, find_archives, package_files
from deploy.release.check import StepFailed, newcomer, refuse_compilers

_VERSION = "9.8.7"
_METADATA = """Metadata-Version: 2.4
Name: mlserver-torch-stream
Version: 9.8.7
Summary: streams
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.10
"""
_KERNELS = f"{PACKAGE}/engine/native/prebuilt/some.so"
_BESIDE_PACKAGE = ("pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE", "README.md")
_OF_PACKAGE = (
    *("py.typed", "version.py", "tool_calls.py", "engine/native/kernels/library.cpp"),
    *("engine/constraints/__init__.py", "server/page/files/index.html", "handlers/shim/ts/__init__.py"),
)


def _make(folder: Path, *, without: str = "", metadata: str = _METADATA, beside: tuple[str, ...] = ()) -> None:
    stem = f"{PACKAGE}-{_VERSION}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-manylinux_2_28_{platform.machine()}.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        for name in (*package_files(), _KERNELS, *beside):
            if name != without:
                wheel.writestr(name, "")
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as sdist:
        for name, text in ((name, "") for name in (*_BESIDE_PACKAGE, *package_files()) if name != without):
            sdist.addfile(_entry(f"{stem}/{name}", text), io.BytesIO(text.encode()))
        sdist.addfile(_entry(f"{stem}/PKG-INFO", metadata), io.BytesIO(metadata.encode()))


def _entry(name: str, text: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    return entry


def test_archives_that_have_everything_pass(tmp_path: Path) -> None:
    _make(tmp_path)
    check_contents(find_archives(tmp_path, _VERSION))


@pytest.mark.long
@pytest.mark.parametrize("name", [*(f"{PACKAGE}/{name}" for name in _OF_PACKAGE), _KERNELS, *_BESIDE_PACKAGE])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    _make(tmp_path, without=name)
    with pytest.raises(BadArchive, match="compiled ahead" if name.endswith(".so") else name):
        check_contents(find_archives(tmp_path, _VERSION))


@pytest.mark.parametrize("field", ["Summary", "License-Expression", "Requires-Python"])
def test_a_missing_field_of_the_metadata_is_found(tmp_path: Path, field: str) -> None:
    kept = "".join(line for line in _METADATA.splitlines(keepends=True) if not line.startswith(field))
    _make(tmp_path, metadata=kept)
    with pytest.raises(BadArchive, match=field):
        check_contents(find_archives(tmp_path, _VERSION))


def test_compiled_python_is_not_released(tmp_path: Path) -> None:
    _make(tmp_path, beside=(f"{PACKAGE}/__pycache__/version.cpython-311.pyc",))
    with pytest.raises(BadArchive, match="not wanted"):
        check_contents(find_archives(tmp_path, _VERSION))


def test_archives_of_another_version_are_not_those_of_this_release(tmp_path: Path) -> None:
    _make(tmp_path)
    with pytest.raises(BadArchive, match=r"has no mlserver_torch_stream-9\.8\.8"):
        find_archives(tmp_path, "9.8.8")


def test_a_newcomer_has_only_the_new_environment_on_the_path(tmp_path: Path) -> None:
    has = {"PATH": "/usr/bin", "PYTHONPATH": "/checkout", "MLSERVER_DEBUG": "true", "CC": "gcc", "PIP_CERT": "/cert"}
    assert newcomer(tmp_path / "bin", has) == {
        "PATH": str(tmp_path / "bin"),
        "VIRTUAL_ENV": str(tmp_path),
        "PIP_CERT": "/cert",
    }


def test_a_compiler_on_the_path_ends_the_check(tmp_path: Path) -> None:
    refuse_compilers(str(tmp_path))
    compiler = tmp_path / "g++"
    compiler.touch(0o755)
    with pytest.raises(StepFailed, match=str(tmp_path)):
        refuse_compilers(str(tmp_path))
