"""Finds the Python that runs a model's workers: the server's own, or the one that the model's settings name.

Knows nothing of handlers. It installs nothing: where requirements are missing, it returns the command to install them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from mlserver_torch_stream.errors import SettingsError

OLDEST = (3, 8)
_OF_OUR_PYTHON = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")  # another interpreter's packages are elsewhere
_PRINT_VERSION = "import sys; print(*sys.version_info[:2])"
_MOST_S = 60.0


def find_interpreter(given: str, folder: str | None) -> str:
    """``given``: relative to the folder of the settings first, then to the working directory. Raises SettingsError."""
    key = "parameters.extra.python"
    candidates = [Path(given).expanduser().absolute()]
    if folder is not None:
        candidates.insert(0, Path(folder, given).absolute())
    # Links are not resolved: Python finds its virtual environment by the link's folder.
    path = next((str(each) for each in candidates if each.is_file()), None)
    if path is None:
        raise SettingsError(f"{key}: no such interpreter: {given}")
    try:
        run = subprocess.run(
            [path, "-c", _PRINT_VERSION], capture_output=True, env=environment_of(path), timeout=_MOST_S, text=True
        )
        version = tuple(map(int, run.stdout.split()))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"{key}: {path} is not a Python interpreter that runs: {error}") from None
    if run.returncode or version < OLDEST:
        problem = run.stderr.strip()[-500:] or f"it is Python {'.'.join(map(str, version))}"
        raise SettingsError(f"{key}: {path}: handlers need Python {OLDEST[0]}.{OLDEST[1]} or later: {problem}")
    return path


def environment_of(python: str | None) -> dict[str, str]:
    """The part of the server's environment that a worker inherits. ``python``: None for the server's own."""
    left_out = _OF_OUR_PYTHON if python is not None else ()
    return {key: value for key, value in os.environ.items() if key not in left_out}


def not_installed(requirements: str, uri: str, uses_venv: bool) -> str:
    """One line about an archive's ``requirementsFile`` where the model has no interpreter of its own."""
    line = f"{requirements} is not installed by the server: where it is needed, {_how_to_install(uri, requirements)}"
    if not uses_venv:
        return line
    return f"useVenv: {line}; or set parameters.extra.useVenv to false for the server's own environment"


def _how_to_install(uri: str, requirements: str) -> str:
    """The command that installs the requirements into an environment of their own."""
    path = uri.removeprefix("file://")
    folder, unpack = path, ""
    if not Path(path).is_dir():
        module = "tarfile" if path.endswith((".tar.gz", ".tgz")) else "zipfile"
        folder, unpack = "unpacked", f"python3 -m {module} -e {shlex.quote(path)} unpacked && "
    # Requirements seldom name torch, because TorchServe's environments have the server's.
    install = f"venv/bin/pip install torch -r {shlex.quote(os.path.join(folder, requirements))}"
    return f"run `python3 -m venv venv && {unpack}{install}` and set parameters.extra.python to its venv/bin/python"
