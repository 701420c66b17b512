"""Replays a captured decode step for a number of sequences: one graph for each stage of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.cuda_graphs.step_shape import StepShape
from mlserver_torch_stream.engine.devices import sent
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, Stage


@dataclass(slots=True)
class StageSegment:
    """The work of a step in one stage, from its first module to its last; ``stage`` is None if there is only one.

    ``numbers`` is the step's tensor on the stage's device, which is written if ``takes_numbers``. ``arrivals`` are
    tensors of earlier segments, each with its captured copy in this one. ``departures`` are the tensors that later
    segments need. They are copied before the step leaves the stage, as the next step in this stage overwrites them.
    """

    stage: Stage | None
    device: torch.device
    numbers: torch.Tensor
    takes_numbers: bool = False
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    work: list[Callable[[], None]] = field(default_factory=list)
    departures: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """``run`` replays the step. ``logits``: ``[rows, vocab]``, a row for each sequence that the shape has room for."""

    shape: StepShape
    segments: Sequence[StageSegment]
    logits: torch.Tensor
    pipeline: Pipeline | None

    def run(self, batch: Batch) -> torch.Tensor:
        """Returns the logits of the new token of each sequence, in the model's dtype."""
        numbers = self.shape.numbers(batch.sequences)
        copies: dict[int, torch.Tensor] = {}
        for segment in self.segments:
            if self.pipeline is not None and segment.stage is not None:
                self.pipeline.enter(segment.stage)
            if segment.takes_numbers:
                segment.numbers.copy_(sent(numbers, segment.device))
            self._copy_arrivals(segment, copies)
            for work in segment.work:
                work()
            copies.update((id(tensor), tensor.clone()) for tensor in segment.departures)
        return self.logits[: len(batch.sequences)].clone()

    def _copy_arrivals(self, segment: StageSegment, copies: dict[int, torch.Tensor]) -> None:
        for source, local in segment.arrivals:
            value = copies[id(source)]
            if self.pipeline is not None:
                value = self.pipeline.bring(value, segment.device)
            local.copy_(value)
