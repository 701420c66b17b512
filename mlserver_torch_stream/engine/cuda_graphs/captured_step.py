"""Replays a captured decode step for a number of rows: graphs, and between them attentions and changes of the stage.

Knows nothing of batches, nor of the device that replays. A graph holds addresses of memory, and the slabs of a cache
move and grow: so the attentions are not captured, and run on the cache's own slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mlserver_torch_stream.engine.cuda_graphs.attention_cuts import Attend
from mlserver_torch_stream.engine.cuda_graphs.decode_masks import DecodeMasks
from mlserver_torch_stream.engine.devices import from_host
from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline
from mlserver_torch_stream.engine.pipeline.stages import Stage

Part = tuple[Sequence[Sequence[int]], RowCache]
"""One token, ``[rows][1]``, for every row of a cache."""


@dataclass(frozen=True, slots=True)
class CapturedAttention:
    """One attention of a captured step. The graphs before and after it write and read these tensors."""

    attend: Attend
    module: torch.nn.Module
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    options: dict[str, Any]

    def run(self, rows: slice, cache: RowCache, masks: DecodeMasks) -> None:
        """Runs for ``rows`` of the step, which are all rows of ``cache``."""
        keys, values = cache.cache.update(self.key[rows], self.value[rows], self.layer)
        mask = masks.over(keys.shape[2])
        output, _ = self.attend(self.module, self.query[rows], keys, values, mask, **self.options)
        self.output[rows].copy_(output)


@dataclass(slots=True)
class StageSegment:
    """The work of a step in one stage, from its first module to its last; ``stage`` is None if there is only one.

    ``arrivals`` are tensors of earlier segments, each with its captured copy in this one. ``departures`` are the
    tensors that later segments need. They are copied before the step leaves the stage, as the next step in this stage
    overwrites them.
    """

    stage: Stage | None
    device: torch.device
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    work: list[Callable[[], None] | CapturedAttention] = field(default_factory=list)
    departures: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """``run`` replays the step for up to ``rows`` rows, of one cache or of several, and returns their logits.

    ``inputs`` holds tokens and positions, ``[2, rows, 1]``, so that one copy brings both to the device. Unused rows
    have 0 for both: a model may change all rows by the largest of their positions.
    ``added`` is the dtype of masks that are added to the scores; None: boolean masks.
    """

    rows: int
    inputs: torch.Tensor
    segments: Sequence[StageSegment]
    logits: torch.Tensor
    pipeline: Pipeline | None
    added: torch.dtype | None

    def run(self, parts: Sequence[Part]) -> torch.Tensor:
        """Returns the logits ``[rows, vocabulary]`` of all parts, in the model's dtype. Does not commit the caches."""
        copies: dict[int, torch.Tensor] = {}
        for segment in self.segments:
            if self.pipeline is not None and segment.stage is not None:
                self.pipeline.enter(segment.stage)
            if segment is self.segments[0]:
                self._write_inputs(parts)
            self._copy_arrivals(segment, copies)
            self._replay(segment, parts)
            copies.update((id(tensor), tensor.clone()) for tensor in segment.departures)
        return self.logits[: sum(len(tokens) for tokens, _ in parts)].clone()

    def _write_inputs(self, parts: Sequence[Part]) -> None:
        ids = [row for tokens, _ in parts for row in tokens]
        positions = [[length] for _, cache in parts for length in cache.lengths]
        unused = [[0]] * (self.rows - len(ids))
        self.inputs.copy_(from_host([[*ids, *unused], [*positions, *unused]], self.inputs.device))

    def _copy_arrivals(self, segment: StageSegment, copies: dict[int, torch.Tensor]) -> None:
        for source, local in segment.arrivals:
            value = copies[id(source)]
            if self.pipeline is not None:
                value = self.pipeline.bring(value, segment.device)
            local.copy_(value)

    def _replay(self, segment: StageSegment, parts: Sequence[Part]) -> None:
        batches, first = [], 0
        for tokens, cache in parts:
            rows = slice(first, first := first + len(tokens))
            batches.append((rows, cache, DecodeMasks(cache.lengths, segment.device, self.added)))
        for work in segment.work:
            if isinstance(work, CapturedAttention):
                for batch in batches:
                    work.run(*batch)
            else:
                work()
