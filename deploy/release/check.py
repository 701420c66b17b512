"""Installs a release as a newcomer does, each archive in a fresh environment, and asks the server for streams.

``python -m deploy.release.check --dist FOLDER``. No compiler is on the path, nothing is compiled, and no
process runs in the checkout or finds it. Prints each step with the seconds since the start.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.release.archives import BadArchive, check_contents, find_archives
from mlserver_torch_stream.version import __version__

CHECKOUT = Path(__file__).parents[2]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig", "ld", "as", "nvcc")
_ASK = Path(__file__).parent / "ask.py"
_CONSTRAINTS = CHECKOUT / "constraints.txt"
_OPENAI = "openai==3.54.0"
_INSTALL_S = 1800.0
_READY_S = 600.0
_ASK_S = 300.0
_END_S = 120.0
_NOT_INHERITED = ("MLSERVER_", "PYTHON", "VIRTUAL_ENV", "CC", "CXX", "WHEEL_MACHINE")
_INSTALL_LINE = re.compile(r"pip install (--no-deps \S+)")


class StepFailed(Exception):
    """Raised if a step does not do what a newcomer expects. The message has the step's output."""


class Steps:
    """Prints each step with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, words: str) -> None:
        print(f"[{time.monotonic() - self._start:5.0f} s] {words}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the archives of a release.")
    parser.add_argument("--dist", required=True, type=Path, help="the folder with the wheel and the sdist")
    parser.add_argument("--only", choices=("wheel", "sdist"), help="check only this archive; default: both")
    arguments = parser.parse_args(argv)
    steps = Steps()
    try:
        archives = find_archives(arguments.dist.resolve(), __version__)
        check_contents(archives)
        steps.say(f"contents and metadata: {archives.wheel.name}, {archives.sdist.name}")
        for kind, archive in (("wheel", archives.wheel), ("sdist", archives.sdist)):
            if arguments.only in (None, kind):
                with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
                    check_archive(archive, Path(folder), steps)
    except (BadArchive, StepFailed) as error:
        sys.exit(f"error: {error}")
    steps.say("the release installs and streams")
    return 0


def check_archive(archive: Path, folder: Path, steps: Steps) -> None:
    """Takes a newcomer's path, from an empty folder to streams. Raises StepFailed if a step fails."""
    steps.say(f"{archive.name}: a fresh environment with Python {sys.version.split()[0]}")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True, timeout=_INSTALL_S)
    commands = folder / "env" / "bin"
    environment = {**newcomer(commands, os.environ), "MLSERVER_TORCH_STREAM_CACHE": str(folder / "cache")}
    refuse_compilers(environment["PATH"])
    steps.say(f"{archive.name}: pip install")
    constrained = ["-c", str(_CONSTRAINTS), "--only-binary", ":all:"]
    torch = next(line for line in _CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    _pip(commands, folder, environment, *constrained, torch)
    _pip(commands, folder, environment, *constrained, str(archive))
    _check_place(commands, folder, environment)
    steps.say(f"{archive.name}: mlserver-torch-stream serve, which has to ask for the embedded model")
    asked = _INSTALL_LINE.search(_refusal(commands, folder, environment))
    if asked is None:
        raise StepFailed("`mlserver-torch-stream serve` does not say how to install the embedded model")
    steps.say(f"{archive.name}: pip install {asked[1]}")
    _pip(commands, folder, environment, *asked[1].split())
    _pip(commands, folder, environment, _OPENAI, "-c", str(_CONSTRAINTS))
    steps.say(f"{archive.name}: mlserver-torch-stream serve")
    with _served(commands, folder, environment) as (url, log):
        kernels = [line for line in log.read_text().splitlines() if "kernels" in line]
        steps.say(f"{archive.name}: ready at {url}; {kernels[0] if kernels else 'no line about kernels'}")
        if archive.suffix == ".whl" and not any("prebuilt" in line for line in kernels):
            raise StepFailed(f"the server does not use the wheel's prebuilt kernels:\n{log.read_text()}")
        for line in _run([commands / "python", _ASK, url], folder, environment, _ASK_S).splitlines():
            steps.say(f"{archive.name}: {line}")
    steps.say(f"{archive.name}: the server has ended with status 0")


def newcomer(commands: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of somebody who has only activated the new environment."""
    kept = {key: value for key, value in environ.items() if not key.startswith(_NOT_INHERITED)}
    return {**kept, "PATH": str(commands), "VIRTUAL_ENV": str(commands.parent)}


def refuse_compilers(path: str) -> None:
    found = [place for name in COMPILERS if (place := shutil.which(name, path=path)) is not None]
    if found:
        raise StepFailed(f"there is a compiler on the path: {', '.join(found)}")


def _pip(commands: Path, folder: Path, environment: Mapping[str, str], *words: str) -> None:
    pip: list[str | Path] = [commands / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, "--progress-bar", "off", *words], folder, environment, _INSTALL_S)


def _check_place(commands: Path, folder: Path, environment: Mapping[str, str]) -> None:
    script = "import mlserver_torch_stream as package; print(package.__file__, package.__version__)"
    place, version = _run([commands / "python", "-c", script], folder, environment, _ASK_S).split()
    if not Path(place).is_relative_to(commands.parent) or version != __version__:
        raise StepFailed(f"Python imports version {version} at {place} instead of the installed {__version__}")


def _refusal(commands: Path, folder: Path, environment: Mapping[str, str]) -> str:
    command: list[str | Path] = [commands / "mlserver-torch-stream", "serve"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_READY_S)
    if ended.returncode == 0:
        raise StepFailed(
            "`mlserver-torch-stream serve` ended with status 0 although the embedded model is not installed"
        )
    return ended.stderr


def _run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], seconds: float) -> str:
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    if ended.returncode:
        raise StepFailed(
            f"{' '.join(map(str, command))} ended with status {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )
    return ended.stdout


@contextmanager
def _served(commands: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Runs the installed server until the block ends, and yields its address and its log."""
    log = folder / "log"
    with log.open("wb") as sink:
        command: list[str | Path] = [commands / "mlserver-torch-stream", "serve"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sink, stderr=sink)
    try:
        end = time.monotonic() + _READY_S
        while (ready := re.search(r"is ready\. Ask it", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > end:
                raise StepFailed(f"the server did not become ready:\n{log.read_text()}")
            time.sleep(0.2)
        assert ready is not None
        started = re.search(r"^Starting on (\S+)", log.read_text(), re.MULTILINE)
        assert started is not None
        yield started[1], log
    finally:
        process.terminate()
        status = process.wait(_END_S)
    if status:
        raise StepFailed(f"the server ended with status {status}:\n{log.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
