"""An environment that has only the packages of requirements-vllm.txt, and so no torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

import mlserver_torch_stream

_ROOT = Path(__file__).parents[2]
REQUIREMENTS = _ROOT / "requirements-vllm.txt"
_VENV_S = 120


def requirements() -> list[Requirement]:
    """Returns the requirements that apply to this Python."""
    lines = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    wanted = [Requirement(line) for line in lines]
    return [each for each in wanted if each.marker is None or each.marker.evaluate()]


def new_environment(folder: Path) -> Path:
    """Returns the interpreter of an environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=_VENV_S)
    return folder / "bin" / "python"


def linked_environment(folder: Path) -> Path:
    """Returns the interpreter of an environment whose packages are links to those of this one."""
    python = new_environment(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "mlserver_torch_stream").symlink_to(Path(mlserver_torch_stream.__file__).parent)
    for requirement in requirements():
        installed = distribution(requirement.name)
        for file in installed.files or ():
            if file.parts[0] != "..":
                _link(site, Path(str(installed.locate_file(""))), file.parts)
    return python


def _link(site: Path, source: Path, parts: tuple[str, ...]) -> None:
    """Links the file, or the outermost package that contains it. Several distributions can share a namespace."""
    for end in range(1, len(parts) + 1):
        place, original = site.joinpath(*parts[:end]), source.joinpath(*parts[:end])
        if place.is_symlink():
            return
        if end == len(parts) or (original / "__init__.py").exists() or original.suffix in (".dist-info", ".libs"):
            place.symlink_to(original)
            return
        place.mkdir(exist_ok=True)
