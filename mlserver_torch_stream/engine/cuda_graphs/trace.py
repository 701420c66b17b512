"""Captures a decode step: the model's own packed forward, cut where it enters another stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mlserver_torch_stream.engine.attention.paged_attention import BatchTensors
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cuda_graphs.captured_step import CapturedStep, StageSegment
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.step_shape import StepShape
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, Stage


def capture_step(
    forward: ModelForward,
    cache: PagedCache,
    capture: GraphCapture,
    shape: StepShape,
    pipeline: Pipeline | None = None,
) -> CapturedStep:
    """The pools of ``cache`` must be there. Raises the errors of the model and the device."""
    trace = _Trace(capture, shape, forward.device)
    with trace.follow(pipeline), capture.recording():
        logits = trace.run(forward, cache)
    return CapturedStep(shape, tuple(trace.segments), logits, pipeline)


class _Trace:
    """Follows one forward. A capture is open whenever the model's code runs."""

    def __init__(self, capture: GraphCapture, shape: StepShape, device: torch.device) -> None:
        self._thread = threading.get_ident()  # other engines over these weights run in threads of their own
        self._capture = capture
        self._shape = shape
        self.segments = [StageSegment(None, device, shape.empty(device))]
        # What the current segment has made of its numbers.
        self._made: tuple[torch.Tensor, BatchTensors] | None = None
        # The current segment's copies of tensors of earlier segments, by the id of the original.
        self._local: dict[int, torch.Tensor] = {}
        # Arguments and results of the stages' modules, each with the segment that made it.
        self._origins: dict[int, tuple[torch.Tensor, StageSegment]] = {}

    def run(self, forward: ModelForward, cache: PagedCache) -> torch.Tensor:
        self._begin()
        ids, _ = self._inputs()
        logits = forward.packed_tokens(ids, self._on, cache)
        self._end()
        return logits

    def _inputs(self) -> tuple[torch.Tensor, BatchTensors]:
        """Returns the token ids and the batch of the current segment."""
        segment = self.segments[-1]
        if self._made is None:
            segment.takes_numbers = True
            self._made = self._shape.tensors(segment.numbers)
        return self._made

    def _on(self, device: torch.device) -> BatchTensors:
        if device != self.segments[-1].device:
            raise RuntimeError(f"a layer on {device} computes in the stage of {self.segments[-1].device}")
        return self._inputs()[1]

    def _begin(self) -> None:
        self._capture.begin(self.segments[-1].device, self.segments[-1].stage)

    def _end(self) -> None:
        self.segments[-1].work.append(self._capture.end())

    # --- stages ---

    @contextmanager
    def follow(self, pipeline: Pipeline | None) -> Iterator[None]:
        """Inside it, hooks report every call of a stage's module."""
        with ExitStack() as hooks:
            for stage in pipeline.stages if pipeline is not None else ():
                for module in stage.modules:
                    enter = module.register_forward_pre_hook(partial(self._enter, stage), with_kwargs=True)
                    hooks.callback(enter.remove)
                    hooks.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(
        self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the module's arguments, with this segment's copies of the tensors of other segments."""
        if threading.get_ident() != self._thread:
            return args, kwargs
        self._note((args, kwargs))
        if self.segments[0].stage is None:
            self.segments[0].stage, self.segments[0].device = stage, stage.device
        arrives = stage is not self.segments[-1].stage
        foreign = [each for each in _tensors((args, kwargs)) if arrives or self._is_foreign(each)]
        if arrives or foreign:
            self._end()
            if arrives:
                self._local, self._made = {}, None
                self.segments.append(StageSegment(stage, stage.device, self._shape.empty(stage.device)))
            for each in foreign:
                self._copy_in(each)
            self._begin()
        own: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, lambda each: self._local.get(id(each), each), (args, kwargs)
        )
        return own

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._note(output)

    def _note(self, values: Any) -> None:
        """Attributes tensors that are new to the current segment."""
        for each in _tensors(values):
            self._origins.setdefault(id(each), (each, self.segments[-1]))

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._local and self._origins[id(tensor)][1] is not self.segments[-1]

    def _copy_in(self, tensor: torch.Tensor) -> None:
        if not self._is_foreign(tensor):
            return
        segment, origin = self.segments[-1], self._origins[id(tensor)][1]
        local = self._local[id(tensor)] = tensor.to(segment.device, copy=True)
        segment.arrivals.append((tensor, local))
        if not any(each is tensor for each in origin.departures):
            origin.departures.append(tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
