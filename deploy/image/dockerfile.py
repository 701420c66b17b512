"""Reads a Dockerfile and a .dockerignore. Knows nothing of how the steps are run."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``rest`` is what follows its name, with continuation lines joined."""

    name: str
    rest: str

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """Returns the arguments: unchanged in the JSON form, otherwise split as by a shell, with variables replaced."""
        if self.rest.startswith("["):
            return [str(word) for word in json.loads(self.rest)]
        return [substitute(word, variables) for word in shlex.split(self.rest)]


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Dockerfile:
    """A parsed Dockerfile. ``arguments`` are the ARGs before the first FROM, with their defaults."""

    arguments: dict[str, str]
    stages: list[Stage]


def read_dockerfile(path: Path) -> Dockerfile:
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for each in _instructions(path.read_text(encoding="utf-8")):
        if each.name == "FROM":
            base, _, name = each.rest.partition(" AS ")
            stages.append(Stage(base.strip(), name.strip() or str(len(stages))))
        elif stages:
            stages[-1].instructions.append(each)
        elif each.name == "ARG":
            arguments |= pairs(each, {})
        else:
            raise ValueError(f"{each.name} is before the first FROM, where only ARG may be")
    return Dockerfile(arguments, stages)


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for logical in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if logical.strip():
            name, _, rest = logical.strip().partition(" ")
            yield Instruction(name.upper(), rest.strip())


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Replaces ``$NAME`` and ``${NAME}`` by their values; an unknown variable is empty, as in a Dockerfile."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def pairs(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the names and values of an ARG, an ENV or a LABEL; a value that is left out is empty."""
    return {name: value for name, _, value in (word.partition("=") for word in instruction.words(variables))}


class Ignore:
    """Says which files of a context a .dockerignore leaves out. If several patterns match, the last one decides."""

    def __init__(self, path: Path) -> None:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        self._patterns = [line for line in lines if line and not line.startswith("#")]

    def ignores(self, path: str) -> bool:
        """Returns whether the file at ``path`` (relative to the context, with ``/``) is left out."""
        ignored = False
        for pattern in self._patterns:
            if _matches(path, pattern.removeprefix("!")):
                ignored = not pattern.startswith("!")
        return ignored


def _matches(path: str, pattern: str) -> bool:
    """Returns whether the pattern matches the path or a folder that it is in."""
    parts = path.split("/")
    parents = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern.removeprefix("**/")) for part in parts)
    same_depth = [each for each in parents if each.count("/") == pattern.count("/")]
    return any(fnmatch.fnmatchcase(each, pattern) for each in same_depth)
