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
    """``rest``: what follows the name, its lines joined."""

    name: str
    rest: str

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments: of the JSON form as they are, else split as a shell does, with the variables' values."""
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
    """``arguments``: those before the first FROM, with their defaults."""

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
            raise ValueError(f"{each.name} stands before FROM")
    return Dockerfile(arguments, stages)


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for logical in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if logical.strip():
            name, _, rest = logical.strip().partition(" ")
            yield Instruction(name.upper(), rest.strip())


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Only ``$NAME`` and ``${NAME}``; an unknown name is nothing, as in a Dockerfile."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def pairs(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """The names and values of an ARG, an ENV or a LABEL; a value that is left out is empty."""
    return {name: value for name, _, value in (word.partition("=") for word in instruction.words(variables))}


class Ignore:
    """The files of a context that a .dockerignore leaves out. Of two patterns that match, the later one counts."""

    def __init__(self, path: Path) -> None:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        self._patterns = [line for line in lines if line and not line.startswith("#")]

    def ignores(self, path: str) -> bool:
        """``path``: relative to the context, as ``folder/file``."""
        ignored = False
        for pattern in self._patterns:
            if _matches(path, pattern.removeprefix("!")):
                ignored = not pattern.startswith("!")
        return ignored


def _matches(path: str, pattern: str) -> bool:
    """Whether the pattern names the path or a folder that it is in."""
    parts = path.split("/")
    parents = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern.removeprefix("**/")) for part in parts)
    same_depth = [each for each in parents if each.count("/") == pattern.count("/")]
    return any(fnmatch.fnmatchcase(each, pattern) for each in same_depth)
