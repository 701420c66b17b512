"""The patches for MLServer apply to the installed release, each alone and all together, and their own tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import mlserver
import pytest

from tests.deploy import mlserver_fixtures
from tests.deploy.manifests import DEPLOY

_PATCHES = sorted((DEPLOY / "upstream/mlserver").glob("*.patch"))
_NEW_FILE = re.compile(r"^\+\+\+ b/(tests/.*)$", re.MULTILINE)
_TIMEOUT_S = 120

each_patch = pytest.mark.parametrize("patch", _PATCHES, ids=[path.name[:4] for path in _PATCHES])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the installed MLServer, laid out like a checkout of its repository."""
    package = Path(mlserver.__file__).parent
    shutil.copytree(package, tmp_path / "mlserver", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(mlserver_fixtures.__file__, tmp_path / "conftest.py")
    return tmp_path


def _apply(checkout: Path, patches: Iterable[Path], *options: str) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)}  # else git takes ours for theirs
    for patch in patches:
        command = ["git", "apply", *options, str(patch)]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{patch.name} does not apply to MLServer {mlserver.__version__}: {done.stderr}"


def _test(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Runs the patches' tests. Coroutine tests use pytest-asyncio in MLServer, and anyio in this project."""
    options = [
        "-q",
        "-rfE",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-o",
        "anyio_mode=auto",
    ]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


def _tests_of(patch: Path) -> list[str]:
    return _NEW_FILE.findall(patch.read_text(encoding="utf-8"))


@each_patch
def test_a_patch_applies_alone_and_brings_one_file_of_tests(patch: Path, checkout: Path) -> None:
    _apply(checkout, [patch], "--check")
    assert len(_tests_of(patch)) == 1


@pytest.mark.long
def test_all_patches_apply_in_order_and_their_tests_pass(checkout: Path) -> None:
    assert len(_PATCHES) == 9
    _apply(checkout, _PATCHES)
    done = _test(checkout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@each_patch
def test_a_patch_alone_passes_its_tests(patch: Path, checkout: Path) -> None:
    _apply(checkout, [patch])
    done = _test(checkout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_without_the_patches_each_of_their_files_of_tests_fails(checkout: Path) -> None:
    _apply(checkout, _PATCHES, "--include=tests/*")
    failed = set(re.findall(r"^(?:FAILED|ERROR) ([^:\s]+)", _test(checkout).stdout, re.MULTILINE))
    assert failed == {file for patch in _PATCHES for file in _tests_of(patch)}
