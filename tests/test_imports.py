"""The import rules of docs/architecture.md, checked for every module of the package.

Reads the tables of that page and the modules' source; nothing is imported, so it runs without torch or MLServer.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path, PurePosixPath

import pytest

_ROOT = Path(__file__).parent.parent
_PACKAGE = "mlserver_torch_stream"
_SHIM = "handlers/shim"
_PATHS = {
    str(path.relative_to(_ROOT / _PACKAGE).with_suffix("")).removesuffix("/__init__"): path
    for path in sorted((_ROOT / _PACKAGE).rglob("*.py"))
}  # "cloud/store" -> its file; a package bears its folder's name
_EVERYTHING = "everything"
_LOADS_TORCH_OR_MLSERVER = ("engine", "server", "runtime", "generation", "loading", "handlers")


def _tables() -> list[list[tuple[str, str]]]:
    """Returns the rows of each table below the heading "Imports", as (first cell, second cell), without heads."""
    page = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Imports\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [[line.strip("|\n").split("|") for line in block.splitlines()[2:]] for block in blocks]
    return [[(left, right) for left, right in table] for table in rows]


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


_ROOM_TABLE, _LIBRARY_TABLE = _tables()
_LEAVES = set(_quoted(_ROOM_TABLE[0][0]))
_ALLOWED: dict[str, set[str]] = {leaf: set() for leaf in _LEAVES}
_OPEN: dict[str, list[str]] = {}  # room -> those of its modules that other rooms may import, where not all are
for _left, _right in _ROOM_TABLE[1:]:
    _room_name, *_open = _quoted(_left)
    _ALLOWED[_room_name] = {_EVERYTHING} if _EVERYTHING in _right else set(_quoted(_right))
    if _open:
        _OPEN[_room_name] = _open


def _room(module: str) -> str | None:
    """Returns the innermost folder of the table that contains the module; None for the package's own ``__init__``."""
    parts = module.split("/")
    names = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in _ALLOWED), None)


@cache
def _imports(path: Path, *, at_import_only: bool = False) -> tuple[str, ...]:
    """Returns the absolute names that a file imports. Imports for type checking count, too."""
    return tuple(_names(path, at_import_only))


def _names(path: Path, at_import_only: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_import_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if _module(whole) else node.module or ""


def _module(name: str) -> str | None:
    """Returns the module of the package that an absolute name means."""
    module = name.removeprefix(f"{_PACKAGE}.").replace(".", "/")
    return module if module in _PATHS and name.startswith(f"{_PACKAGE}.") else None


def _top(name: str) -> str:
    return name.partition(".")[0]


def _inner_imports(module: str) -> set[str]:
    return {known for name in _imports(_PATHS[module]) if (known := _module(name)) not in (None, module)}


_MODULES = [module for module in _PATHS if module != "__init__"]


def test_the_page_has_a_line_for_every_room_and_no_other() -> None:
    assert {_room(module) for module in _MODULES} == set(_ALLOWED)


def test_a_module_imports_only_what_its_room_may_know() -> None:
    assert [wrong for module in _MODULES for wrong in _wrong_imports(module)] == []


def _wrong_imports(module: str) -> Iterator[str]:
    room = _room(module)
    assert room is not None, f"{module} lies in no room of docs/architecture.md: add a line to its table"
    allowed = _ALLOWED[room] | _LEAVES
    for known in _inner_imports(module):
        other = _room(known)
        if other == room or other is None:
            continue
        if other not in allowed and _EVERYTHING not in allowed:
            yield f"{module}: {room} must not import {known}"
        elif other in _OPEN and not any(fnmatch(known, pattern) for pattern in _OPEN[other]):
            yield f"{module}: {known} is inside {other}"


def test_a_leaf_imports_only_the_standard_library_and_leaves() -> None:
    for leaf in _LEAVES:
        outside = {name for name in _imports(_PATHS[leaf]) if _top(name) not in sys.stdlib_module_names}
        assert {_module(name) for name in outside} <= _LEAVES, leaf


@pytest.mark.parametrize(("libraries", "places"), _LIBRARY_TABLE)
def test_a_library_is_imported_only_where_the_page_says(libraries: str, places: str) -> None:
    patterns = [pattern for place in _quoted(places) for pattern in (place, f"{place}/*")]
    for module, path in _PATHS.items():
        found = set(map(_top, _imports(path))) & set(_quoted(libraries))
        named = any(fnmatch(module, pattern) for pattern in patterns)
        assert not found or named != ("all but" in places), f"{module} imports {found}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count. The shim is left out, as it has the cycles of TorchServe's own package."""
    graph = {module: _inner_imports(module) for module in _MODULES if not module.startswith(_SHIM)}
    assert _circular(graph) == set()


def _circular(graph: Mapping[str, set[str]]) -> set[str]:
    """Returns the modules of all import cycles, and those between two cycles.

    They are what remains after repeatedly removing modules that import no remaining one, or that none imports.
    """
    left = {module: imported & graph.keys() for module, imported in graph.items()}
    while True:
        imported = set().union(*left.values())
        kept = {module: known & left.keys() for module, known in left.items() if known & left.keys()}
        kept = {module: known for module, known in kept.items() if module in imported}
        if kept == left:
            return set(left)
        left = kept


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Cycles may have any length, and may be inside a top-level folder. A folder and its parent may import each other.

    A module outside any folder counts as a folder.
    """
    graph = {module: _inner_imports(module) for module in _MODULES if not module.startswith(_SHIM)}
    imports = _folder_imports(graph, _folders)
    circular = _circular({folder: set(others) for folder, others in imports.items()})
    assert [
        (folder, *imports[folder][other]) for folder in circular for other in circular & imports[folder].keys()
    ] == []


def _folders(module: str) -> list[str]:
    """Returns the folders that contain the module, from the innermost to that of the table, or else the module."""
    room = _room(module) or ""
    parents = [str(parent) for parent in PurePosixPath(module, "x").parents[:-1]]
    folders = parents if _PATHS[module].name == "__init__.py" else parents[1:]
    return [folder for folder in folders if f"{folder}/".startswith(f"{room}/")] or [module]


def _folder_imports(
    graph: Mapping[str, set[str]], folders_of: Callable[[str], Sequence[str]]
) -> dict[str, dict[str, tuple[str, str]]]:
    """Returns for each folder the folders that it imports, with one import of each; nested folders are left out."""
    imports: dict[str, dict[str, tuple[str, str]]] = {}
    for module, imported in graph.items():
        for known in imported:
            for folder, other in product(folders_of(module), folders_of(known)):
                if not f"{folder}/".startswith(f"{other}/") and not f"{other}/".startswith(f"{folder}/"):
                    imports.setdefault(folder, {})[other] = module, known
    return imports


def test_circles_of_folders_are_found_and_nested_ones_are_not() -> None:
    def circular(graph: Mapping[str, set[str]]) -> set[str]:
        imports = _folder_imports(graph, lambda module: [module.rpartition("/")[0]])
        return _circular({folder: set(others) for folder, others in imports.items()})

    nested = {"r/c/v": {"r/a/x", "r/u"}, "r/u": {"r/c/v"}}
    assert circular({"r/a/x": {"r/b/y"}, "r/b/z": {"r/a/w"}, **nested}) == {"r/a", "r/b"}
    assert circular({"r/a/x": {"r/b/y"}, "r/b/z": {"r/d/w"}, "r/d/v": {"r/a/u"}, **nested}) == {"r/a", "r/b", "r/d"}
    assert circular({"r/a/x": {"r/b/y"}, **nested}) == set()


def test_only_what_builds_an_engine_imports_the_checks_of_a_load() -> None:
    """No folder of the engine does, since what is checked must not depend on its checks."""
    importers = {
        module
        for module in _MODULES
        if "engine/checks" not in _folders(module)
        and any(known.startswith("engine/checks/") for known in _inner_imports(module))
    }
    assert importers <= {"engine/batching", "engine/model", "engine/ranks"}


def test_circles_are_found_and_chains_are_not() -> None:
    assert _circular({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}
    assert _circular({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_the_package_and_its_command_import_nothing_heavy_before_they_are_used() -> None:
    light = set(sys.stdlib_module_names) | {_PACKAGE}
    for path in (_PATHS["__init__"], _PATHS["cli"]):
        names = {_top(name) for name in _imports(path, at_import_only=True)}
        assert names <= light, f"{path}: {names - light}"


def test_a_command_imports_engines_and_mlserver_inside_functions() -> None:
    for module, path in _PATHS.items():
        if _room(module) == "cli":
            names = set(_imports(path, at_import_only=True))
            heavy = {name for name in names if (_module(name) or "").split("/")[0] in _LOADS_TORCH_OR_MLSERVER}
            assert not heavy | {name for name in names if _top(name) == "mlserver"}, module


def test_the_engine_interface_imports_no_torch() -> None:
    for module in ("engine", "engine/api"):
        assert not {_top(each) for each in _imports(_PATHS[module])} & {"torch", "transformers"}
