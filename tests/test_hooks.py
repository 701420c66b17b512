"""docs/hooks.md names each private hook of a library that the package patches or uses, and each of them still exists.

A release of a library that removes one fails here by its name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests import markdown

_PAGE = "docs/hooks.md"
_PACKAGE = Path(__file__).parent.parent / "mlserver_torch_stream"
_LIBRARIES = ["MLServer", "uvicorn and starlette", "gRPC", "transformers, accelerate and gguf", "torch"]
_DISTRIBUTIONS = {"grpc": "grpcio"}
# Functions that are wrapped or called with exactly these parameters.
_PARAMETERS = {
    "mlserver.handlers.DataPlane._infer_contextmanager": ["self", "name", "version"],
    "mlserver.parallel.worker.Worker._ignore_signals": ["self"],
    "mlserver.registry.SingleModelRegistry._find_default": ["self"],
    "mlserver.registry.SingleModelRegistry._find_model": ["self", "version"],
    "mlserver.registry.SingleModelRegistry._refresh_default": ["self", "new_model"],
    "mlserver.rest.server.RESTServer._get_config": ["self"],
    "mlserver.rest.server.RESTServer.add_custom_handlers": ["self", "model"],
    "mlserver.rest.server.RESTServer.start": ["self"],
    "mlserver.server.MLServer.stop": ["self", "sig"],
    "starlette_exporter.middleware.PrometheusMiddleware.__call__": ["self", "scope", "receive", "send"],
    "transformers.utils.chat_parsing.ResponseParser._accumulate": ["self", "events", "text"],
    "transformers.utils.chat_parsing.ResponseParser._close_current": ["self", "events"],
    "transformers.utils.chat_parsing.ResponseParser._open_explicit": ["self", "events", "field", "m"],
    "transformers.utils.chat_parsing.ResponseParser._process": ["self", "events", "eos"],
}
# Where MLServer's main branch has other parameters than 1.7.1, and both are served.
_PARAMETERS_OF_MAIN = {"mlserver.parallel.worker.Worker._ignore_signals": ["self", "loop"]}
# What is named with an underscore and is public, or ours under the same spelling as a library's.
_PUBLIC = {
    *("_exit", "_NamedFuncPointer", "_C", "_error", "_tensors", "_digests", "_first", "_behind"),
    *("_compute", "_computing", "_lacks_mask"),
}

_ROWS = [row for library in _LIBRARIES for row in markdown.table(_PAGE, library)]
_HOOKS = {markdown.code_spans(row[0])[0]: row for row in _ROWS}
# In another environment: tests/engine/test_vllm_itself.py needs them.
_HOOKS_OF_VLLM = {markdown.code_spans(row[0])[0]: row for row in markdown.table(_PAGE, "vLLM")}


@pytest.mark.parametrize("hook", _HOOKS)
def test_the_hook_is_still_there(hook: str) -> None:
    library = hook.partition(".")[0]
    installed = f"{library} {version(_DISTRIBUTIONS.get(library, library))}"
    found, missing = _find(hook)
    assert not missing, f"{installed} has no {hook} any more ({missing}): {_HOOKS[hook][2].strip()}. See {_PAGE}"
    if hook in _PARAMETERS:
        parameters = list(inspect.signature(found).parameters)
        served = (_PARAMETERS[hook], _PARAMETERS_OF_MAIN.get(hook))
        assert parameters in served, f"{installed}: {hook} takes {parameters}. See {_PAGE}"


def _find(hook: str) -> tuple[Any, str]:
    """Returns the object, or None if only instances have it; and the part of it that is missing, or an empty text."""
    words = hook.split(".")
    found: Any = None
    for count in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        break
    for name in words[count:]:
        if (inspect.isclass(found) or inspect.isfunction(found)) and not hasattr(found, name):
            return None, "" if name in _assigned(found) else f"{found.__qualname__} does not set {name}"
        if not hasattr(found, name):
            return None, f"{getattr(found, '__name__', found)} lacks {name}"
        found = getattr(found, name)
    return found, ""


def _assigned(owner: Any) -> set[str]:
    """Returns the attributes that a function, or the methods of a class and its bases, set on an object."""
    names: set[str] = set()
    for each in owner.__mro__ if inspect.isclass(owner) else (owner,):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):  # built in
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_mlservers_decorator_of_grpc_methods_calls_the_variable_that_is_replaced() -> None:
    from mlserver.grpc.servicers import InferenceServicer

    for method in (InferenceServicer.ModelInfer, InferenceServicer.ModelStreamInfer):
        assert "f" in method.__code__.co_freevars, "mlserver.grpc.utils.handle_mlserver_error is written anew"
        assert callable(method.__closure__[method.__code__.co_freevars.index("f")].cell_contents)


def test_mlserver_takes_grpc_aio_from_the_module_that_is_patched() -> None:
    from mlserver.grpc.server import GRPCServer

    assert "aio.server(" in inspect.getsource(GRPCServer._create_server), "MLServer makes its gRPC server elsewhere"


def test_mlserver_creates_its_repository_before_its_servers() -> None:
    from mlserver.server import MLServer

    source = inspect.getsource(MLServer.__init__)
    repository, servers = source.find("resolve_model_repository("), source.find("_create_servers()")
    assert 0 < repository < servers, "MLServer opens its ports before our model repository could guard them"


def test_mlservers_pool_takes_its_workers_from_the_name_that_is_replaced() -> None:
    from mlserver.parallel import pool

    spawned = inspect.getsource(pool._spawn_worker)
    assert "Worker(settings, responses, env)" in spawned, "MLServer makes its inference workers elsewhere"


def test_mlservers_table_of_grpc_codes_can_be_extended() -> None:
    from mlserver.grpc import utils

    assert isinstance(utils.STATUS_CODE_MAPPING, dict), "MLServer's table of gRPC codes cannot be extended"


def test_uvicorn_passes_its_own_cycle_to_the_app() -> None:
    """The transport is found through ``send``, which is a bound method of the object that has it."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    assert "self.send" in inspect.getsource(RequestResponseCycle.run_asgi)
    assert "transport=self.transport" in inspect.getsource(HttpToolsProtocol.on_headers_complete)


def test_the_page_names_every_private_attribute_that_the_package_uses() -> None:
    """The page also names the files or the folder that use it, so that a row is removed with its last use."""
    named: dict[str, set[str]] = defaultdict(set)
    for hook, row in {**_HOOKS, **_HOOKS_OF_VLLM}.items():
        named[hook.rpartition(".")[2]] |= set(markdown.code_spans(row[1]))
    used: dict[str, set[str]] = defaultdict(set)
    for path in sorted(_PACKAGE.rglob("*.py")):
        relative = path.relative_to(_PACKAGE)
        if relative.parts[0] != "torchserve" or relative.parts[1] not in ("shim", "worker"):
            for name in _private_names(path):
                used[name].add(str(relative))
    missing = {(name, file) for name, files in used.items() for file in files if not _covers(named[name], file)}
    assert missing == set()
    stale = {(name, place) for name, places in named.items() for place in places if not _uses(place, name)}
    assert stale == set()


def _covers(places: set[str], file: str) -> bool:
    return any(file.startswith(place) if place.endswith("/") else file == place for place in places)


def _uses(place: str, name: str) -> bool:
    """Returns whether the file, or any file of the folder, contains the name."""
    files = sorted((_PACKAGE / place).rglob("*.py")) if place.endswith("/") else [_PACKAGE / place]
    return any(name in file.read_text(encoding="utf-8") for file in files)


def _private_names(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own:
                found.add(node.attr)
    return found - _PUBLIC


_HOST = "server/host.py"
_OF_THE_SERVER = ("mlserver", "uvicorn", "starlette", "grpc")
_NAMES_OF_THE_SERVER = {hook.rpartition(".")[2] for hook in _HOOKS if hook.partition(".")[0] in _OF_THE_SERVER}
# Names that mean something else too: our own methods and modules, and public attributes of other classes.
_PRIVATE_TO_THE_SERVER = _NAMES_OF_THE_SERVER - {
    *("aio", "start", "stop", "load", "unload", "unload_version", "Worker"),
    *("transport", "disconnected", "add_insecure_port", "_source"),
}


def test_private_parts_of_the_server_are_touched_in_one_module() -> None:
    """These are the ones that docs/hooks.md names, and in ``server/`` any underscored attribute of another object."""
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        relative = str(path.relative_to(_PACKAGE))
        room = relative.startswith(("server/", "handlers/runtime/", "cli/", "runtime", "loading", "protocol/"))
        if room and relative != _HOST and (touched := sorted(_touched(path, relative))):
            found[relative] = touched
    assert found == {}


def _touched(path: Path, relative: str) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    classes = {name.name for node in imports if _is_library(node.module) for name in node.names}
    found = {f"from {node.module}" for node in imports if (node.module or "").startswith("mlserver.parallel")}
    set_here = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    made_here = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in _PRIVATE_TO_THE_SERVER:
            found.add(str(node.value))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            found |= {node.name} & (_PRIVATE_TO_THE_SERVER - {"add_custom_handlers"})
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
            is_own = owner in ("self", "cls") and (node.attr in set_here or node.attr in made_here)
            hidden = relative.startswith("server/") and node.attr.startswith("_") and not node.attr.startswith("__")
            if (node.attr in _PRIVATE_TO_THE_SERVER or (hidden and owner not in ("self", "cls"))) and not is_own:
                found.add(ast.unparse(node))
            if isinstance(node.ctx, ast.Store) and owner in classes and owner[0].isupper():
                found.add(f"{ast.unparse(node)} is set")
    return found


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OF_THE_SERVER
