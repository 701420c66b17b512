"""Streams Hugging Face causal language models token by token on MLServer.

MLServer reloads this module each time it resolves ``implementation: mlserver_torch_stream.TorchStreamRuntime``
(``importlib.reload``), so it contains nothing but lazy re-exports: no torch, no state, no patches.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.version import __version__

if TYPE_CHECKING:
    from mlserver_torch_stream.handlers.runtime import TorchServeRuntime as TorchServeRuntime
    from mlserver_torch_stream.runtime import TorchStreamRuntime as TorchStreamRuntime
    from mlserver_torch_stream.server.access.model_repository import GuardedModelRepository as GuardedModelRepository

__all__ = ["GuardedModelRepository", "TorchServeRuntime", "TorchStreamRuntime", "__version__"]
_EXPORTS = {
    "GuardedModelRepository": "server.access.model_repository",
    "TorchServeRuntime": "handlers.runtime",
    "TorchStreamRuntime": "runtime",
}


def __getattr__(name: str) -> Any:
    if name.startswith("Torch") and name not in _EXPORTS:  # a misspelt runtime, which MLServer alone would skip
        return import_module(f"{__name__}.server.lifecycle.unreadable_model").UnknownRuntime
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
