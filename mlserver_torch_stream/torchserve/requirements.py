"""Installs an archive's requirements into its unpacked folder, which is the first place of its worker's imports.

Knows nothing of workers. This is done only for a model whose settings ask for it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.torchserve.interpreter import environment_of

logger = logging.getLogger(__name__)
_MOST_S = 1800.0
_SHOWN = 1000  # characters of pip's output in an error


def install_requirements(python: str | None, folder: Path, requirements: str) -> None:
    """Runs pip as TorchServe does. ``python``: None for the server's own. Raises LoadFailed."""
    if not (folder / requirements).is_file():
        raise LoadFailed(f"the archive has no {requirements}, which its requirementsFile names")
    command = [python or sys.executable, "-m", "pip", "install", "-U", "-t", str(folder), "-r", requirements]
    logger.info("Installing %s: %s", requirements, " ".join(command))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment_of(python),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_MOST_S,
        )
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"installing {requirements} took longer than {_MOST_S:.0f} s") from None
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip()[-_SHOWN:]
        raise LoadFailed(f"installing {requirements} failed with status {done.returncode}: {said}")
