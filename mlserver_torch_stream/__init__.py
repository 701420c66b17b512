"""Streams Hugging Face causal language models token by token on MLServer.

MLServer reloads this module each time it resolves ``implementation: mlserver_torch_stream.TorchStreamRuntime``
(``importlib.reload``), so it holds nothing but lazy re-exports: no torch, no state, no patches.
"""

from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.version import __version__

if TYPE_CHECKING:
    from mlserver_torch_stream.runtime import TorchStreamRuntime as TorchStreamRuntime
    from mlserver_torch_stream.server.access.model_repository import GuardedModelRepository as GuardedModelRepository
    from mlserver_torch_stream.torchserve.runtime import TorchServeRuntime as TorchServeRuntime

__all__ = ["GuardedModelRepository", "TorchServeRuntime", "TorchStreamRuntime", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "TorchStreamRuntime":
        from mlserver_torch_stream.runtime import TorchStreamRuntime

        return TorchStreamRuntime
    if name == "TorchServeRuntime":
        from mlserver_torch_stream.torchserve.runtime import TorchServeRuntime

        return TorchServeRuntime
    if name == "GuardedModelRepository":
        from mlserver_torch_stream.server.access.model_repository import GuardedModelRepository

        return GuardedModelRepository
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
