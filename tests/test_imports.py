"""The rooms' one-way rules, read from the imports themselves.

Knows the rules only; nothing is imported, so it runs without torch or MLServer.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_PACKAGE = "mlserver_torch_stream"
_MODULES = sorted((_ROOT / _PACKAGE).rglob("*.py"))

# Room -> the rooms it may import, besides itself.
_ALLOWED = {
    "version": set(),
    "types": set(),
    "errors": set(),
    "model_source": {"errors"},
    "settings": {"types", "errors", "model_source"},
    "protocol": {"types", "errors"},
    "engine": {"types", "errors", "settings", "model_source"},
    "prompt_pieces": {"types", "errors"},
    "generation": {"types", "errors", "engine", "prompt_pieces"},
    "server": {"version", "types", "errors", "settings", "protocol", "engine", "generation"},
    "loading": {"types", "errors", "settings", "protocol", "engine"},
    "runtime": {"types", "errors", "settings", "protocol", "engine", "generation", "loading", "server"},
    "torchserve": {"version", "types", "errors", "settings", "model_source", "protocol"},
    # Glue to MLServer: the endpoints, the drain and the errors are those of our token models, not a second set of them.
    "torchserve/runtime": {"types", "errors", "protocol", "torchserve", "server"},
    "torchserve/shim": {"torchserve"},  # what stands in for TorchServe's own package, which imports torch
    "client": set(),
    "cloud": {"types", "errors", "settings", "protocol"},
}
_TORCH = {"torch", "transformers", "accelerate", "tokenizers", "safetensors", "gguf"}
_MAY_IMPORT_TORCH = {"engine", "torchserve/shim"}
_MAY_IMPORT_MLSERVER = {"runtime", "loading", "server", "protocol", "torchserve/runtime"}
_NO_ASYNCIO = {"types", "errors", "settings", "model_source", "protocol"}
_LAZY = {"cli", "__init__"}  # may import everything, inside functions


def _room(path: Path) -> str:
    parts = path.relative_to(_ROOT / _PACKAGE).parts
    inner = "/".join(parts[:2])
    return inner if inner in _ALLOWED else parts[0].removesuffix(".py")


def _imports(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Absolute names of the imported modules; type-checking imports count, as they are knowledge too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_import_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_ROOT / _PACKAGE)))
def test_a_room_imports_only_the_rooms_it_may_know(path: Path) -> None:
    room = _room(path)
    if room in _LAZY:
        return
    assert room in _ALLOWED, f"{room} is a new room: say here what it may know"
    modules = {child.stem if child.suffix == ".py" else child.name for child in (_ROOT / _PACKAGE).iterdir()}
    for name in _imports(path):
        if _top(name) != _PACKAGE or name.count(".") == 0:
            continue
        known = name.split(".")[1]
        if known in modules:
            assert known in _ALLOWED[room] | {room}, f"{room} must not know {known}"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_ROOT / _PACKAGE)))
def test_only_some_rooms_import_torch_mlserver_and_asyncio(path: Path) -> None:
    room = _room(path)
    tops = {_top(name) for name in _imports(path, at_import_only=room in _LAZY)}
    if room not in _MAY_IMPORT_TORCH:
        assert not tops & _TORCH
    if room not in _MAY_IMPORT_MLSERVER:
        assert not tops & {"mlserver", "fastapi", "starlette", "grpc"}
    if room in _NO_ASYNCIO:
        assert "asyncio" not in tops


def test_the_package_and_its_command_import_nothing_heavy_before_they_are_used() -> None:
    light = set(sys.stdlib_module_names) | {_PACKAGE}
    for path in (_ROOT / _PACKAGE / "__init__.py", _ROOT / _PACKAGE / "cli" / "__init__.py"):
        names = {_top(name) for name in _imports(path, at_import_only=True)}
        assert names <= light, f"{path}: {names - light}"


def test_the_engine_interface_imports_no_torch() -> None:
    for name in ("__init__", "api"):
        assert not {_top(each) for each in _imports(_ROOT / _PACKAGE / "engine" / f"{name}.py")} & _TORCH


@pytest.mark.parametrize(
    ("library", "modules"),
    [("obstore", {"cloud/store.py"}), ("aiokafka", {"cloud/kafka.py"}), ("ray", {"cli/cloud_on_ray.py"})],
)
def test_only_one_module_knows_each_library_of_the_cloud(library: str, modules: set[str]) -> None:
    know = {str(path.relative_to(_ROOT / _PACKAGE)) for path in _MODULES if library in map(_top, _imports(path))}
    assert know <= modules
