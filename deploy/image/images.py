"""Builds a Dockerfile's target with buildah, as root and without a registry, and unpacks the image.

The base is a Debian that debootstrap makes; it is imported under the name in ``FROM``. Each step runs in a chroot, with
this machine's pip settings. Knows nothing of the server that the image starts.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.image.host_pip import HostPip

_STEP_S = 3600.0
_DEBIAN = re.compile(r"debian:(\w+)-slim")
_PIP_CONFIGURATION = "/etc/xdg/pip"  # where pip reads the machine's settings


class StepFailed(Exception):
    """Raised if a command fails, or if the base image cannot be made here."""


@dataclass(frozen=True)
class Image:
    """An image whose files are at ``root``. ``user`` is ``uid:gid``; ``health`` is the command of its health check."""

    root: Path
    environment: Mapping[str, str]
    folder: str
    user: str
    volumes: Sequence[str]
    health: Sequence[str]
    entrypoint: Sequence[str]
    command: Sequence[str]


class Builder:
    """Builds images, and keeps them below the folder ``work``. A build reuses the layers of earlier builds.

    ``pip`` has the settings of pip for every RUN.
    """

    def __init__(self, work: Path, pip: HostPip) -> None:
        self._work = work
        self._pip = pip
        self._buildah = ("buildah", "--root", str(work / "storage"), "--runroot", str(work / "run"))

    def build(self, dockerfile: Path, context: Path, target: str, base: str, arguments: Mapping[str, str]) -> Image:
        """Builds the stage ``target`` with these build arguments, and returns its image.

        Raises StepFailed if a command fails, or if ``base`` is not a Debian that can be made here.
        """
        self._import(base)
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        mounts = {place: source for place, source in self._pip.binds.items() if source.exists()}
        mounts[_PIP_CONFIGURATION] = self._pip.write(self._work / "pip")
        options += [f"--volume={source}:{place}:ro" for place, source in mounts.items()]
        options += ["--isolation=chroot", "--pull=never", "--format=docker", "--layers", f"--target={target}"]
        self._call("rm", "--all")  # containers of an earlier build
        self._call("build", *options, "--file", str(dockerfile), "--tag", target, str(context), shown=True)
        return self._unpack(target)

    def _import(self, base: str) -> None:
        """Makes the Debian that ``base`` names, unless there is one from an earlier build."""
        found = _DEBIAN.fullmatch(base)
        if found is None:
            raise StepFailed(f"FROM {base}: the base must be debian:RELEASE-slim, which debootstrap can make")
        if any(name.endswith(f"/{base}") for name in self._call("images", "--format", "{{.Name}}:{{.Tag}}").split()):
            return
        root = self._work / "debian"
        shutil.rmtree(root, ignore_errors=True)
        call("debootstrap", "--variant=minbase", found[1], str(root), shown=True)
        container = self._call("from", "scratch").strip()
        self._call("add", "--quiet", container, str(root), "/")
        self._call("commit", "--quiet", "--rm", container, base)
        shutil.rmtree(root)

    def _unpack(self, name: str) -> Image:
        found: dict[str, Any] = json.loads(self._call("inspect", "--type", "image", name))["Docker"]["config"]
        root = Path(self._call("mount", self._call("from", "--pull=never", name).strip()).strip())
        return Image(
            root,
            dict(each.split("=", 1) for each in found["Env"]),
            found["WorkingDir"],
            found["User"],
            list(found["Volumes"]),
            found["Healthcheck"]["Test"][1:],  # after the word CMD
            found["Entrypoint"],
            found["Cmd"],
        )

    def _call(self, *words: str, shown: bool = False) -> str:
        return call(*self._buildah, *words, shown=shown)


def call(*command: str, shown: bool = False) -> str:
    """Runs a command, and returns its output; empty if the output is shown. Raises StepFailed if the command fails."""
    output = None if shown else subprocess.PIPE
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, text=True, timeout=_STEP_S)
    if done.returncode:
        raise StepFailed(f"the command ended with status {done.returncode}: {shlex.join(command)}")
    return done.stdout or ""
