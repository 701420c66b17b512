"""Sends pieces of a response before its end, and imports a class by its name."""

from __future__ import annotations

import importlib
from typing import Any


def send_intermediate_predict_response(
    ret: Any, req_id_map: dict[int, str], message: str, code: int, context: Any
) -> None:
    """Sends one piece of each request's answer.

    ``ret`` holds the pieces by the request's index, as a list or a dict; a request without an entry gets no piece.
    ``context`` is the context that ``handle`` got.
    """
    context.send_intermediate(ret, req_id_map, message, code)


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """Imports the class ``module.Class``, or ``Class`` of the module ``module_prefix``. Raises ImportError."""
    if not class_name:
        raise ImportError("no class name")
    module_name, _, name = class_name.rpartition(".")
    path = ".".join(part for part in (module_prefix, module_name) if part)
    if not path:
        raise ImportError(f"{class_name!r} has no module: write module.Class")
    found = getattr(importlib.import_module(path), name, None)
    if found is None:
        raise ImportError(f"no class {name} in {path}")
    return found
