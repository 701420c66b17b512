"""Gives each of an engine's caches a forward: where decode steps can be captured, one that replays them.

Captured steps hold the addresses of one cache, so a new cache needs new ones.
"""

from __future__ import annotations

import torch
import transformers

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.attention.cuda_choice import copies_keys
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.checks.verify_concurrency import check_pipeline
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import capture_on
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.cuda_graphs.verify_graphs import take_graphs
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline
from mlserver_torch_stream.engine.process_resources import ProcessResources
from mlserver_torch_stream.engine.tensor_parallel.ranked_cache import RankedForward


class CapturedForwards:
    """The forwards of one engine, for up to ``max_sequences`` sequences of up to ``longest`` tokens."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        forward: Forward,
        max_sequences: int,
        longest: int,
        pipeline: Pipeline | None,
        resources: ProcessResources,
    ) -> None:
        self._model = model
        self._forward = forward
        self._max_sequences = max_sequences
        self._longest = longest
        self._pipeline = pipeline
        self._resources = resources
        self.description = ""  # of the newest one, for the summary of a load

    def over(self, cache: PagedCache) -> Forward:
        """Returns the forward for a cache that holds no sequences yet: the check of graphs writes to all its pages."""
        forward = self._forward
        own = forward.own if isinstance(forward, RankedForward) else forward
        if not isinstance(own, ModelForward):
            return forward
        with self._resources.capture_lock, torch.inference_mode():
            reserved = _reserved_bytes(own)
            graphs = self._take(own, cache)
            reserved = _reserved_bytes(own) - reserved - (0 if graphs is None else _pool_bytes(cache))
        self.description = "" if graphs is None else _describe(graphs, reserved)
        if graphs is None:
            return forward
        return forward.replaying(graphs) if isinstance(forward, RankedForward) else graphs

    def _take(self, own: ModelForward, cache: PagedCache) -> GraphForward | None:
        """Captures decode steps over a cache; with tensor parallelism every rank captures them. None: not captured."""
        capture, pipeline = self._resources.capture_on or capture_on, self._pipeline
        if isinstance(self._forward, RankedForward):
            return self._forward.capture(cache, self._max_sequences, self._longest, capture)
        return take_graphs(
            own,
            cache,
            self._max_sequences,
            self._longest,
            capture,
            copies_keys=copies_keys(own.attention),
            pipeline=pipeline,
            check=None if pipeline is None else lambda taken: check_pipeline(self._model, pipeline, taken, cache),
        )


def _describe(graphs: GraphForward, taken: int) -> str:
    size = f" in {format_bytes(taken)}" if taken > 0 else ""
    return f"CUDA graphs of up to {graphs.max_sequences} sequences{size}, "


def _reserved_bytes(forward: ModelForward) -> int:
    """Returns the memory that torch holds on the forward's CUDA devices, that of captured steps included."""
    return sum(torch.cuda.memory_reserved(device) for device in forward.devices if device.type == "cuda")


def _pool_bytes(cache: PagedCache) -> int:
    pools = (pool for layer in cache.layers.values() for pool in (layer.keys, layer.values) if pool is not None)
    return sum(pool.untyped_storage().nbytes() for pool in pools if pool.is_cuda)
