"""Runs the build steps of a Dockerfile in folders, without a container engine: as root, by debootstrap and chroot.

Knows nothing of the server that the image starts. A step that it cannot do is an error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.image.dockerfile import Dockerfile, Ignore, Instruction, Stage, pairs, substitute
from deploy.image.host_pip import HostPip

_STEP_S = 3600.0
_DEBIAN = re.compile(r"debian:(\w+)-slim")
_ROOT_S = {"HOME": "/root"}  # container engines set it for RUN
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class StepFailed(Exception):
    """A step of the Dockerfile that fails, or that cannot be done here."""


@dataclass
class Image:
    """What a stage has made. ``user``: ``uid:gid``."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    folder: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


class Builder:
    """``given``: the build arguments. ``pip``: of this machine, for every RUN."""

    def __init__(self, context: Path, work: Path, given: Mapping[str, str], pip: HostPip) -> None:
        self._context = context
        self._ignore = Ignore(context / ".dockerignore")
        self._work = work
        self._given = given
        self._pip = pip
        self._images: dict[str, Image] = {}
        self._arguments: dict[str, str] = {}

    def build(self, dockerfile: Dockerfile, say: Callable[[str], None], results: Mapping[str, Path]) -> Image:
        """The last stage's image. ``results``: stages that are not run, with the folders in their places."""
        for stage in dockerfile.stages:
            if stage.name in results:
                say(f"FROM … AS {stage.name}: not run, {results[stage.name]} instead")
                self._images[stage.name] = Image(results[stage.name])
                continue
            say(f"FROM {stage.base} AS {stage.name}")
            variables = {name: self._given.get(name, value) for name, value in dockerfile.arguments.items()}
            image = self._begin(substitute(stage.base, variables), stage)
            for each in stage.instructions:
                say(f"  {each.name} {each.rest}")
                self._do(image, each)
        return image

    def _begin(self, base: str, stage: Stage) -> Image:
        root = self._work / "stages" / stage.name
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        before = self._images.get(base)
        _call(["cp", "-a", str(self._debian(base) if before is None else before.root), str(root)])
        image = Image(root) if before is None else Image(root, dict(before.environment), before.folder, before.user)
        self._images[stage.name] = image
        self._arguments = {}
        return image

    def _debian(self, base: str) -> Path:
        found = _DEBIAN.fullmatch(base)
        if found is None:
            raise StepFailed(f"FROM {base}: only debian:…-slim can be made here")
        root = self._work / base.replace(":", "-")
        if not root.is_dir():
            half = root.with_name(f"{root.name}.partial")
            shutil.rmtree(half, ignore_errors=True)
            _call(["debootstrap", "--variant=minbase", found[1], str(half)])
            half.rename(root)
        return root

    def _do(self, image: Image, each: Instruction) -> None:
        variables = {**self._arguments, **image.environment}
        if each.name == "ARG":
            self._arguments |= {name: self._given.get(name, value) for name, value in pairs(each, variables).items()}
        elif each.name == "ENV":
            image.environment |= pairs(each, variables)
        elif each.name == "RUN":
            self._run(image, each.rest, variables)
        elif each.name == "COPY":
            self._copy(image, each.words(variables))
        elif each.name == "WORKDIR":
            image.folder = os.path.join(image.folder, each.words(variables)[0])
            _inside(image.root, image.folder).mkdir(parents=True, exist_ok=True)
        elif each.name == "USER":
            image.user = each.words(variables)[0]
        elif each.name == "VOLUME":
            image.volumes += each.words(variables)
        elif each.name == "HEALTHCHECK":
            image.health = Instruction("CMD", each.rest.partition(" CMD ")[2]).words({})
        elif each.name == "ENTRYPOINT":
            image.entrypoint = each.words({})
        elif each.name == "CMD":
            image.command = each.words({})
        elif each.name not in ("LABEL", "EXPOSE"):
            raise StepFailed(f"{each.name}: this instruction cannot be run here")

    def _run(self, image: Image, command: str, variables: Mapping[str, str]) -> None:
        if image.user != "0:0":
            raise StepFailed(f"RUN {command}: a RUN after USER cannot be run here")
        binds = self._pip.binds
        made = [_mountpoint(image.root, place, source.is_dir()) for place, source in binds.items()]
        script = [f"mount -t proc proc {image.root}/proc", f"mount --rbind /dev {image.root}/dev"]
        for place, source in binds.items():
            script.append(f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(_inside(image.root, place)))}")
        script.append('exec "$@"')
        words = [f"{name}={value}" for name, value in {**_ROOT_S, **self._pip.variables, **variables}.items()]
        chroot = ["chroot", str(image.root), "/usr/bin/env", "-i", *words]
        chroot += ["sh", "-ec", f"cd {shlex.quote(image.folder)}; {command}"]
        try:
            _call(["unshare", "--mount", "sh", "-ec", "\n".join(script), "sh", *chroot])
        finally:
            for path in filter(None, made):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _copy(self, image: Image, words: Sequence[str]) -> None:
        *sources, target = words
        stage = next((word.removeprefix("--from=") for word in sources if word.startswith("--from=")), None)
        root = self._context if stage is None else self._images[stage].root
        to = _inside(image.root, os.path.join(image.folder, target))
        found = [path for word in sources if not word.startswith("--") for path in sorted(root.glob(word.lstrip("/")))]
        if not found:
            raise StepFailed(f"COPY {' '.join(words)}: there is no such file")
        for path in found:
            if stage is None and self._ignore.ignores(str(path.relative_to(root))):
                raise StepFailed(f"COPY {path.relative_to(root)}: .dockerignore leaves it out")
            if path.is_dir():
                shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True, ignore=self._left_out(stage))
            else:
                place = to / path.name if target.endswith("/") else to
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)

    def _left_out(self, stage: str | None) -> Callable[[str, list[str]], list[str]]:
        def left_out(folder: str, names: list[str]) -> list[str]:
            if stage is not None:
                return []
            inside = Path(folder).relative_to(self._context)
            return [name for name in names if self._ignore.ignores(str(inside / name))]

        return left_out


def _inside(root: Path, place: str) -> Path:
    return root / place.lstrip("/")


def _mountpoint(root: Path, place: str, is_folder: bool) -> Path | None:
    """Makes the place, and returns the uppermost path that was not there before."""
    path = _inside(root, place)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    if missing and is_folder:
        path.mkdir(parents=True)
    elif missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return missing[-1] if missing else None


def _call(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_STEP_S)
    if done.returncode:
        raise StepFailed(f"status {done.returncode}: {shlex.join(command)}")
