"""State that a whole process shares is created in two named modules, whose docstrings give the reason.

Reads the source and imports nothing of the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent / "mlserver_torch_stream"
_NAMED = {"engine/shared_pool.py", "handlers/pool/handler_metrics.py"}


@cache
def _trees() -> dict[str, ast.Module]:
    """Returns the syntax tree of each module, without the shim.

    The shim's state has TorchServe's own names, and handlers import it in their own processes.
    """
    return {
        str(path.relative_to(_PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(_PACKAGE.rglob("*.py"))
        if "shim" not in path.parts
    }


def _is_mutable(node: ast.ClassDef) -> bool:
    """Returns whether the class's objects have attributes that can change; those of a frozen dataclass cannot."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    changeable = any(each.startswith("dataclass") and "frozen=True" not in each for each in decorators)
    return changeable or any(
        isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and _is_name(target.value, "self")
        for target in ast.walk(node)
    )


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@cache
def _mutable() -> set[str]:
    return {
        node.name
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and _is_mutable(node)
    }


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)


def _creates(tree: ast.Module) -> list[str]:
    calls = [node for node in _outside_functions(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if _last_name(call.func) in _mutable()]


def _last_name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def test_objects_of_our_own_mutable_classes_are_module_level_in_the_named_modules_only() -> None:
    found = {module: created for module, tree in _trees().items() if (created := _creates(tree))}
    assert found.keys() == _NAMED, found


def test_no_function_rebinds_a_name_of_its_module() -> None:
    found = {
        f"{module}:{node.lineno}"
        for module, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    }
    assert found == set()


def test_the_servers_state_is_asked_for_only_by_what_mlserver_builds() -> None:
    """All other code gets it as an argument."""
    asking = {
        module
        for module, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_name(node.func, "server_state")
    }
    built = {"server/base_runtime.py", "server/access/model_repository.py", "server/lifecycle/unreadable_model.py"}
    assert asking == built | {"cli/rank.py"}
