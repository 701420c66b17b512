"""Captures a decode step: the model's own forward, cut at every attention and at every change of the stage.

Knows nothing of batches, nor of the device that captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cuda_graphs.attention_cuts import (
    EAGER,
    CannotCut,
    PassingCache,
    attention_of,
    cut_at_attention,
)
from mlserver_torch_stream.engine.cuda_graphs.captured_step import CapturedAttention, CapturedStep, StageSegment
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture
from mlserver_torch_stream.engine.forward.model_forward import input_device, plain_forward
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline
from mlserver_torch_stream.engine.pipeline.stages import Stage


def capture_step(
    model: PreTrainedModel,
    capture: GraphCapture,
    rows: int,
    windows: Sequence[int | None],
    pipeline: Pipeline | None = None,
) -> CapturedStep:
    """``windows`` are those of the cache's layers. Raises CannotCut, or the errors of the model and the device."""
    device = input_device(model)
    inputs = torch.zeros((2, rows, 1), dtype=torch.long, device=device)
    implementation = model.config._attn_implementation
    trace = _Trace(capture, implementation, device, windows)
    with cut_at_attention(model, trace.attention), trace.follow(pipeline), capture.recording():
        logits = trace.run(plain_forward(model), inputs)
    return CapturedStep(
        rows=rows,
        inputs=inputs,
        segments=tuple(trace.segments),
        logits=logits,
        pipeline=pipeline,
        added=logits.dtype if implementation == EAGER else None,
    )


class _Trace:
    """Follows one forward. A capture is open whenever the model's code runs."""

    def __init__(
        self, capture: GraphCapture, implementation: str, device: torch.device, windows: Sequence[int | None]
    ) -> None:
        self._capture = capture
        self._implementation = implementation
        self._passing = PassingCache(list(windows))
        self._windows = windows
        self.segments = [StageSegment(None, device)]
        # The current segment's copies of tensors of earlier segments, by the id of the original.
        self._local: dict[int, torch.Tensor] = {}
        # Arguments and results of the stages' modules, each with the segment that made it.
        self._origins: dict[int, tuple[torch.Tensor, StageSegment]] = {}

    def run(self, forward: Callable[..., Any], inputs: torch.Tensor) -> torch.Tensor:
        self._begin()
        output = forward(
            input_ids=inputs[0], position_ids=inputs[1], past_key_values=self._passing, use_cache=True, return_dict=True
        )
        logits: torch.Tensor = output.logits[:, -1]
        self._end()
        layers = sorted(
            work.layer for segment in self.segments for work in segment.work if isinstance(work, CapturedAttention)
        )
        if layers != list(range(len(self._windows))):
            raise CannotCut(f"{len(layers)} attentions over {len(self._windows)} cache layers")
        return logits

    def _begin(self) -> None:
        self._capture.begin(self.segments[-1].device)

    def _end(self) -> None:
        self.segments[-1].work.append(self._capture.end())

    # --- attentions ---

    def attention(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        layer = self._passing.layer_of(key, value)
        if mask is not None or more.get("position_bias") is not None:
            raise CannotCut("its code makes masks of its own")
        self._end()
        attend = attention_of(self._implementation, module)
        # Zeros, as a model may reduce over all rows, and unused memory could hold NaN.
        shape = attend(module, query, key, value, None, **more)[0]
        output = torch.zeros_like(shape, memory_format=torch.contiguous_format)
        self.segments[-1].work.append(CapturedAttention(attend, module, layer, query, key, value, output, more))
        self._begin()
        return output, None

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
        self._note((args, kwargs))
        if self.segments[0].stage is None:
            self.segments[0].stage, self.segments[0].device = stage, stage.device
        arrives = stage is not self.segments[-1].stage
        foreign = [each for each in _tensors((args, kwargs)) if arrives or self._is_foreign(each)]
        if arrives or foreign:
            self._end()
            if arrives:
                self._local = {}
                self.segments.append(StageSegment(stage, stage.device))
            for each in foreign:
                self._copy_in(each)
            self._begin()
        own: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, lambda each: self._local.get(id(each), each), (args, kwargs)
        )
        return own

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
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
