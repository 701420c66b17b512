"""Builds a running engine from settings: loads the model and starts its engine, which several users can share.

The functions block until the model is loaded, so call them in a thread.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from mlserver_torch_stream.engine.fingerprint import engine_key, weights_key
from mlserver_torch_stream.engine.loading.model_files import is_panic
from mlserver_torch_stream.engine.machine import read_host, thread_count, trim_heap
from mlserver_torch_stream.engine.running_engine import OnDeath, RunningEngine
from mlserver_torch_stream.engine.shared_pool import PROCESS, Lease, ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.work_threads import WorkCancelled


class BuiltEngine:
    """One user's share of a running engine, which other users may use at the same time."""

    def __init__(self, lease: Lease[RunningEngine], resources: ProcessResources) -> None:
        self.engine = lease.value.engine
        self.codec = lease.value.codec
        self.summary = lease.value.summary
        self.adapters = lease.value.adapters
        self.lease = lease
        self.resources = resources

    def give_back(self) -> bool:
        """Ends this user's share. Returns True to the last user of the engine, who then has to shut it down."""
        return self.lease.end()

    def shutdown(self) -> None:
        """Stops the engine and frees its memory. Blocks."""
        self.lease.value.stop(self.resources)


def build_engine(
    resolved: ResolvedSettings, owner: str = "", on_death: OnDeath | None = None, resources: ProcessResources = PROCESS
) -> BuiltEngine:
    """Loads the model that the settings name and starts its engine. Raises LoadFailed with one line that says why.

    A cancelled load frees its memory and raises WorkCancelled.

    Engines share weights that are already loaded. The same ``owner`` with the same settings gets the same engine.
    """
    threads = thread_count(resolved.settings, read_host())
    key = engine_key(resolved, owner, weights_key(resolved, threads))
    return BuiltEngine(resources.engines.lease(key, lambda: _load(resolved, threads, on_death, resources)), resources)


def _load(
    resolved: ResolvedSettings, threads: int, on_death: OnDeath | None, resources: ProcessResources
) -> RunningEngine:
    running = None
    try:
        running = _runner(resolved)(resolved, threads, resources, on_death)
    except WorkCancelled:
        pass
    except BaseException as error:
        if not is_panic(error):
            raise
        raise LoadFailed(f"cannot load {resolved.source.name}: its tokenizer is damaged: {error}") from error
    if running is None:
        reclaim_memory()  # here the error is freed, with the frames that held a part of the model
        raise WorkCancelled
    try:
        gc.collect()  # frees objects in reference cycles that the load left
        trim_heap()
    except BaseException:
        running.stop(resources)
        raise
    return running


def _runner(resolved: ResolvedSettings) -> Callable[..., RunningEngine]:
    """Imports and returns the function that runs the model. If vLLM runs the model, torch is not imported."""
    if resolved.settings.vllm is not None:
        from mlserver_torch_stream.engine.vllm.vllm_engine import run_vllm

        return run_vllm
    from mlserver_torch_stream.engine.own_engine import run_own

    return run_own


def reclaim_memory() -> None:
    """Frees what loads and engines have left behind: modules in reference cycles, free heap and CUDA blocks."""
    gc.collect()
    if "torch" in sys.modules:  # it is not where vLLM runs all models
        _reclaim_cuda_memory()
    trim_heap()


def _reclaim_cuda_memory() -> None:
    import torch

    from mlserver_torch_stream.engine.loading.pinned import release_pinned

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        release_pinned()
