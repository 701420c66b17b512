"""Builds an engine from the settings that MLServer read, and checks the defaults of requests.

``build`` imports torch, unless vLLM runs the model, and blocks, so it is called in a thread.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlserver_torch_stream.errors import InvalidInput, LoadFailed, SettingsError
from mlserver_torch_stream.protocol.request_options import check_defaults
from mlserver_torch_stream.settings import ResolvedSettings, parse_settings

if TYPE_CHECKING:
    from mlserver import ModelSettings

    from mlserver_torch_stream.engine.build import BuiltEngine

# Several threads may load models at the same time: one imports, with the process's collector off; the rest wait for it.
_importing = threading.Lock()
_OWN_CODE = "mlserver_torch_stream.engine.own_engine"
_VLLM_CODE = "mlserver_torch_stream.engine.vllm.vllm_engine"
_NO_TORCH = "this environment has no torch, so vLLM must run the model: set parameters.extra.vllm, or install torch"


def resolve(settings: ModelSettings, source: str | None) -> ResolvedSettings:
    """Reads a model's settings. ``source`` is the path of their file. Raises SettingsError."""
    source_folder = os.path.dirname(source) if source else None
    parameters = settings.parameters
    if parameters is None:  # MLServer found no parameters block: only the environment counts
        return parse_settings(source_folder=source_folder)
    return parse_settings(parameters.uri, parameters.extra, parameters.model_extra, source_folder)


def build(resolved: ResolvedSettings, owner: str, on_death: Callable[[BaseException], None]) -> BuiltEngine:
    """Builds a model's engine. Raises LoadFailed, or SettingsError if the model's own defaults allow no request."""
    built = _engine_builder(_OWN_CODE if resolved.settings.vllm is None else _VLLM_CODE)(resolved, owner, on_death)
    try:
        check_defaults(built.engine.info)
    except InvalidInput as error:
        if built.give_back():
            built.shutdown()
        raise SettingsError(f"{error.message} (from parameters.extra or the model's generation config)") from None
    return built


def _engine_builder(code: str) -> Callable[..., BuiltEngine]:
    """On its first call, imports the module ``code`` and freezes its objects, and the objects of torch and
    transformers, in the garbage collector.

    These half a million objects are never freed. When the collector walked them, every stream was delayed by 0.3 s,
    about once in a thousand requests, and the import took a second longer. A full collection took 230 ms without the
    freeze and 5 ms with it (2026-11-21). Nothing is collected between the import and the freeze, because that takes
    0.3 s and frees 0.6 MB (2026-11-29).
    """
    with _importing:
        if code not in sys.modules:
            collects = gc.isenabled()
            gc.collect()  # what earlier models have left
            gc.disable()
            try:
                importlib.import_module(code)
                gc.freeze()
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise LoadFailed(_NO_TORCH) from None
            finally:
                if collects:
                    gc.enable()
    from mlserver_torch_stream.engine.build import build_engine

    return build_engine
