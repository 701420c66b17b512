"""Finds and initialises a handler's entry point in an archive's folder, as TorchServe does.

Each problem is raised as a HandlerRefused with one line, and the model's load fails with this line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

Entry = Callable[[Any, Any], Any]
ENVELOPES = ("body", "json", "kserve", "kservev2")
_OF_KSERVE = {"kserve": "instances", "kservev2": "inputs"}  # envelope -> the key in bodies of its protocol
_METHODS = ("initialize", "handle")
_SHIM = Path(__file__).parent.parent / "shim"
_PACKAGE = "mlserver-torch-stream[torchserve]"
# TorchServe 0.12's own handlers, each with the packages to install for it.
_HANDLERS = "mlserver-torch-stream[torchserve-handlers]"
BUILT_IN = {
    "base_handler": _PACKAGE,
    "dali_image_classifier": f"{_HANDLERS} and nvidia-dali",
    "densenet_handler": _PACKAGE,
    "image_classifier": _HANDLERS,
    "image_segmenter": _HANDLERS,
    "object_detector": _HANDLERS,
    "text_classifier": _HANDLERS,
    "trt_llm_handler": f"{_PACKAGE} and tensorrt_llm",
    "vllm_handler": f"{_PACKAGE} and vllm==0.6.1.post2",  # TorchServe's documented version; later versions lack modules
}


class HandlerRefused(Exception):
    """Raised if the handler cannot be loaded."""


@dataclass(frozen=True)
class Handler:
    """A handler's functions: ``initialize(context)`` is called once, and ``entry(data, context)`` for each batch."""

    entry: Entry
    initialize: Callable[[Any], Any]


def provide_ts(which: str) -> None:
    """Makes ``import ts`` work: with the torchserve package if it is installed, else with the shim.

    ``which`` is ``auto``, ``shim`` or ``package``. Raises HandlerRefused if ``which`` is ``package`` and torchserve is
    not installed.
    """
    installed = which != "shim" and _installed()
    if which == "package" and not installed:
        raise HandlerRefused(f"torchserve is not installed: install {_PACKAGE}")
    if not installed:
        sys.path.insert(0, str(_SHIM))


def _installed() -> bool:
    try:
        return importlib.util.find_spec("ts.torch_handler") is not None
    except ImportError:  # no package ts, or another package of this name
        sys.modules.pop("ts", None)
        return False


def enter(folder: str) -> None:
    """Makes an archive's folder the working directory and the first entry of ``sys.path``."""
    os.chdir(folder)
    sys.path.insert(0, folder)


def find_handler(spelled: str, folder: str, envelope: str, asynchronous: bool) -> Handler:
    """Imports a handler and finds its functions.

    ``spelled`` is ``file[.py][:function]`` or the name of one of TorchServe's handlers. ``asynchronous`` says whether
    the model sets ``asyncCommunication``, which needs an ``async def``. Raises HandlerRefused.
    """
    file, _, function = spelled.partition(":")
    name = re.sub(r"\.py$", "", file.rsplit("/", 1)[-1])
    module = _import(name, Path(folder), spelled)
    found = _in_module(module, function)
    if inspect.iscoroutinefunction(found.entry) != asynchronous:
        raise HandlerRefused(
            "asyncCommunication needs an `async def handle`, but the handler's is not async"
            if asynchronous
            else "the handler is an `async def`: set asyncCommunication: true in model-config.yaml"
        )
    return Handler(_enveloped(found.entry, envelope, asynchronous), found.initialize) if envelope else found


def _import(name: str, folder: Path, spelled: str) -> ModuleType:
    path = next((each for each in (folder / f"{name}.py", folder / name / "__init__.py") if each.is_file()), None)
    if path is None:
        return _built_in(name, spelled)
    # The module keeps its name, which classes and pickles refer to, unless another module has that name already.
    module_name = f"handler_{name}" if name in sys.modules else name
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        more = f" (install {_PACKAGE}, whose package ts may contain it)" if _shim_lacks(error) else ""
        raise HandlerRefused(f"importing {path.name} raised {described(error)}{more}") from error
    return module


def _built_in(name: str, spelled: str) -> ModuleType:
    """Imports one of TorchServe's handlers from its package; the shim has ``base_handler``."""
    if name not in BUILT_IN:
        raise HandlerRefused(f"no handler {spelled!r} in the archive, nor in TorchServe, which has {_names(BUILT_IN)}")
    try:
        return importlib.import_module(f"ts.torch_handler.{name}")
    except ModuleNotFoundError as error:
        own = error.name == f"ts.torch_handler.{name}"
        why = "is in the torchserve package" if own else f"needs a module that is missing, {error.name}"
        raise HandlerRefused(f"TorchServe's handler {spelled!r} {why}: install {BUILT_IN[name]}") from None
    except Exception as error:  # torchvision, for example, raises RuntimeError if torch has another version
        raise HandlerRefused(f"TorchServe's handler {spelled!r} cannot be imported: {described(error)}") from error


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _in_module(module: ModuleType, function: str) -> Handler:
    entry = getattr(module, function or "handle", None)
    if callable(entry):
        return Handler(entry, lambda context: entry(None, context))
    if function:
        raise HandlerRefused(f"{module.__name__} has no function {function!r}")
    own = _own_classes(module)
    classes = [each for each in own if hasattr(each, "initialize") and hasattr(each, "handle")]
    if len(classes) != 1:
        raise HandlerRefused(
            f"{module.__name__} must have a function `handle` or exactly one class with initialize and handle; "
            f"{_instead(module, own, classes)}"
        )
    make: Callable[[], Any] = classes[0]
    try:
        made = make()
    except BaseException as error:
        raise HandlerRefused(f"{classes[0].__name__}() raised {described(error)}") from error
    return Handler(made.handle, made.initialize)


def _own_classes(module: ModuleType) -> list[type]:
    return [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]


def _instead(module: ModuleType, own: list[type], classes: list[type]) -> str:
    """Describes the classes and functions of a module that has no entry point."""
    if classes:
        return f"it has {_names(each.__name__ for each in classes)}"
    if own:
        lacks = (
            f"{each.__name__} has no {' and no '.join(name for name in _METHODS if not hasattr(each, name))}"
            for each in own
        )
        return f"its class {'; '.join(lacks)}"
    functions = [
        name
        for name, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == module.__name__ and not name.startswith("_")
    ]
    if functions:
        file = Path(str(module.__file__)).name
        return f"it has no class, and the functions {_names(functions)}: name one as {file}:{functions[0]}"
    return "it defines neither a class nor a function"


def _enveloped(entry: Entry, envelope: str, asynchronous: bool) -> Entry:
    if envelope not in ENVELOPES:
        raise HandlerRefused(f"unknown envelope {envelope!r}; the envelopes are {', '.join(ENVELOPES)}")
    if asynchronous:
        raise HandlerRefused("asyncCommunication cannot be combined with a service envelope")
    if envelope not in _OF_KSERVE:
        return _envelope(envelope, entry)
    by_protocol = {name: _envelope(name, entry) for name in _OF_KSERVE}
    return lambda data, context: by_protocol[_protocol(data, envelope)](data, context)


def _envelope(name: str, entry: Entry) -> Entry:
    module = importlib.import_module(f"ts.torch_handler.request_envelope.{name}")
    make: Callable[[Entry], Any] = _own_classes(module)[0]
    handle: Entry = make(entry).handle
    return handle


def _protocol(data: Any, otherwise: str) -> str:
    """Chooses KServe's envelope by a key of the first request's body; a body with neither key gets ``otherwise``."""
    body = data[0].get("data") or data[0].get("body") if data else None
    try:
        body = json.loads(body) if isinstance(body, (bytes, bytearray)) else body
    except ValueError:  # the envelope reports it
        return otherwise
    keys = body if isinstance(body, dict) else ()
    return next((name for name, key in _OF_KSERVE.items() if key in keys), otherwise)


def _shim_lacks(error: BaseException) -> bool:
    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] != "ts":
        return False
    return str(_SHIM) in str(getattr(sys.modules.get("ts"), "__file__", ""))


def described(error: BaseException) -> str:
    """Returns the type and the text of an error in one line."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(value: object) -> str:
    """Returns ``str(value)`` of a handler's object, or a note if its ``__str__`` raises."""
    try:
        return str(value)
    except BaseException as error:
        return f"(its __str__ raised {type(error).__name__})"
