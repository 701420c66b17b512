"""A server of another project: how its environment is made, how it is started, and how requests are sent to it.

All files of a peer are in a separate folder outside the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.endpoints import HttpEndpoint, Spelling
from benchmarks.process import free_ports, running
from benchmarks.servers import Live, answering, clean_environment, wait_until_ready

TORCH = "torch==2.13.0"
_INSTALL_S = 3600.0
_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


class PeerUnavailable(Exception):
    """Raised if a peer cannot be installed or prepared here; the message says why in one line."""


@dataclass(frozen=True)
class Installed(ABC):
    """A program installed in its own folder ``home``. ``model`` is the folder of the weights that every peer gets."""

    home: Path
    model: Path
    distributions: Sequence[str] = ()  # whose versions are recorded with the results

    @abstractmethod
    def make(self) -> None:
        """Installs the peer; called once. Raises PeerUnavailable if it cannot be installed."""

    def install(self) -> None:
        """Installs the peer unless the marker file of an earlier installation exists. Raises PeerUnavailable."""
        marker = self.home / ".installed"
        if marker.is_file():
            return
        self.home.mkdir(parents=True, exist_ok=True)
        self.make()
        marker.write_text(json.dumps(self.versions()) + "\n")

    def versions(self) -> dict[str, str]:
        found = subprocess.run(
            [str(self.python), "-c", _VERSIONS, *self.distributions], capture_output=True, text=True, timeout=60
        )
        return dict(json.loads(found.stdout)) if found.returncode == 0 else {}

    # --- for those that live in a virtual environment ---

    @property
    def python(self) -> Path:
        return self.home / "venv" / "bin" / "python"

    def make_venv(self) -> None:
        if not self.python.exists():
            self.run([sys.executable, "-m", "venv", str(self.home / "venv")])

    def pip(self, *arguments: str) -> None:
        self.run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def install_torch(self) -> None:
        index = os.environ.get("TORCH_INDEX")
        self.pip("install", "--progress-bar", "off", TORCH, *(["--index-url", index] if index else []))

    def run(self, command: Sequence[str], folder: Path | None = None) -> str:
        """Runs a command, and returns and logs its output. If it fails, raises PeerUnavailable with the last line."""
        log = self.home / "install.log"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            done = subprocess.run(
                command, cwd=folder or self.home, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_INSTALL_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerUnavailable(str(error)) from None
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            raise PeerUnavailable(
                f"{Path(command[0]).name} {' '.join(command[1:4])}: {(lines or ['failed'])[-1][:300]}"
            )
        return done.stdout


@dataclass(frozen=True)
class Peer(Installed):
    """A peer that streams events over HTTP, so that the cases of ``make bench`` can be run against it.

    ``weights`` is a GGUF file that is served instead of the model's folder, for peers with ``reads_gguf``.
    """

    weights: Path | None = None
    streams: int = 32  # the most at once

    name: str = "a peer"
    reads_gguf: bool = False
    ready_path: str = "/health"

    @abstractmethod
    def command(self, folder: Path, port: int) -> Sequence[str]:
        """Returns the command that starts it; ``folder`` is a new, empty folder for this start."""

    @property
    @abstractmethod
    def spelling(self) -> Spelling: ...

    def prepare(self) -> None:
        """Makes the files that it needs of the model, such as a converted copy. Raises PeerUnavailable on failure."""

    def environment(self) -> Mapping[str, str]:
        return {}

    @contextmanager
    def start(self, folder: Path) -> Iterator[Live]:
        (port,) = free_ports(1)
        log = self.home / "server.log"
        log.unlink(missing_ok=True)
        began = time.perf_counter()
        environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", **self.environment()}
        with running(self.command(folder, port), environment, log, folder) as process:
            wait_until_ready(process, lambda: answering(port, self.ready_path) == 200, log)
            endpoints = {"rest": HttpEndpoint(port, self.spelling)}
            yield Live(process.pid, port, time.perf_counter() - began, endpoints)
