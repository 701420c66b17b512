"""One name for one thing: classes and files of the package, read from its source.

Imports nothing of the package. The shim is left out, as its names are those of TorchServe's own package.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parent.parent / "mlserver_torch_stream"
_SHIM = _PACKAGE / "handlers" / "shim"
_MODULES = [path for path in sorted(_PACKAGE.rglob("*.py")) if _SHIM not in path.parents]


class _Class(NamedTuple):
    name: str
    place: str
    bases: frozenset[str]


@cache
def _classes() -> list[_Class]:
    return [
        _Class(
            node.name,
            f"{path.relative_to(_PACKAGE)}:{node.lineno}",
            frozenset(ast.unparse(base).partition("[")[0] for base in node.bases),
        )
        for path in _MODULES
        for node in _nodes(path, r"\bclass \w")
        if isinstance(node, ast.ClassDef)
    ]


def _nodes(path: Path, pattern: str) -> Iterator[ast.AST]:
    """Yields all nodes of a file; none if its source does not match, as walking through all files takes seconds."""
    source = path.read_text(encoding="utf-8")
    return ast.walk(ast.parse(source)) if re.search(pattern, source) else iter(())


def test_a_class_name_stands_once_in_the_package() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for each in _classes():
        found[each.name].append(each.place)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_file_name_stands_once_in_each_room() -> None:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in _MODULES:
        relative = path.relative_to(_PACKAGE)
        if path.name != "__init__.py":
            found[(relative.parts[0], path.name)].append(str(relative))
    assert {key: places for key, places in found.items() if len(places) > 1} == {}


def test_no_class_is_imported_under_another_name() -> None:
    renamed = []
    for path in _MODULES:
        for node in _nodes(path, r"\b[A-Z]\w* as \w"):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlserver_torch_stream"):
                renamed += [
                    f"{path.relative_to(_PACKAGE)}:{node.lineno}: {alias.name} as {alias.asname}"
                    for alias in node.names
                    if alias.asname not in (None, alias.name) and alias.name[0].isupper()
                ]
    assert renamed == []


def test_no_attribute_chooses_the_kind_of_a_model() -> None:
    """A model is a ``ServedModel``, whose methods all kinds have; its class says which kind it is."""
    found = []
    for path in _MODULES:
        relative = str(path.relative_to(_PACKAGE))
        if relative.startswith(("server/", "handlers/runtime/", "runtime")):
            for call in (node for node in _nodes(path, "hasattr|getattr") if isinstance(node, ast.Call)):
                name, about = ast.unparse(call.func), ast.unparse(call.args[0]) if call.args else ""
                if name == "hasattr" or (name == "getattr" and about.rpartition(".")[2].strip("_") == "model"):
                    found.append(f"{relative}:{call.lineno}")
    assert found == []


def test_a_request_is_entered_and_its_refusal_recorded_in_one_place() -> None:
    """Every endpoint has a ``Request``; no endpoint gets its model from MLServer, or records a refusal, by itself."""
    found = defaultdict(set)
    for path in _MODULES:
        relative = str(path.relative_to(_PACKAGE))
        if relative.startswith(("server/", "handlers/runtime/", "runtime", "generation")):
            for node in _nodes(path, "enter|refused"):
                if isinstance(node, ast.Attribute) and node.attr in ("enter", "refused"):
                    found[node.attr].add(relative)
    assert found["enter"] == found["refused"] == {"server/request.py"}


def test_no_code_asks_which_forward_or_attention_it_has() -> None:
    """``LoadedForward`` and ``PagedAttention`` have all that their callers need."""
    bases = {each.name: each.bases for each in _classes()}
    kinds = {"Forward", "LoadedForward", "PagedAttention"}
    while more := {name for name, above in bases.items() if above & kinds} - kinds:
        kinds |= more
    assert {"ModelForward", "NativeForward", "RankedForward", "GatheredAttention", "VarlenAttention"} <= kinds
    asked = [
        f"{path.relative_to(_PACKAGE)}:{node.lineno}"
        for path in _MODULES
        for node in _nodes(path, "isinstance|issubclass")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("isinstance", "issubclass")
        if {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)} & kinds
    ]
    assert asked == []
