"""One decode step of so many rows as it was recorded: parts to repeat, attentions between them, and stages to visit.

Knows nothing of batches or of which device records. The attentions run as ever, on the cache's own slabs: these move
and grow, and a recording holds on to addresses.
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
    """One attention of a captured step. The captured parts before and after it read and write the same tensors."""

    attend: Attend
    module: torch.nn.Module
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    options: dict[str, Any]

    def run(self, rows: slice, cache: RowCache, masks: DecodeMasks) -> None:
        """For these rows of the recording, which are all of the cache."""
        keys, values = cache.cache.update(self.key[rows], self.value[rows], self.layer)
        mask = masks.over(keys.shape[2])
        output, _ = self.attend(self.module, self.query[rows], keys, values, mask, **self.options)
        self.output[rows].copy_(output)


@dataclass(slots=True)
class StageVisit:
    """What is done in one stage, from its first module to its last; ``stage`` is None where there is only one.

    ``arrivals``: tensors of earlier visits, with those that were recorded in their place. A stage that is left is
    free for other rows, which overwrite what it holds: so what is still wanted of it, ``departures``, is copied first.
    """

    stage: Stage | None
    device: torch.device
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    work: list[Callable[[], None] | CapturedAttention] = field(default_factory=list)
    departures: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """``run`` takes the tokens of at most ``rows`` rows, of one cache or of several, and gives their logits.

    ``inputs``: tokens and positions, ``[2, rows, 1]``, in one tensor: one copy to the device for both. Those of rows
    that are over are 0: a model may do something to all rows for the greatest of their positions.
    ``added``: the dtype of masks that are added to the scores, None: they choose.
    """

    rows: int
    inputs: torch.Tensor
    visits: Sequence[StageVisit]
    logits: torch.Tensor
    pipeline: Pipeline | None
    added: torch.dtype | None

    def run(self, parts: Sequence[Part]) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` of the model's dtype, part after part. Does not count tokens in the caches."""
        carried: dict[int, torch.Tensor] = {}
        for visit in self.visits:
            if self.pipeline is not None and visit.stage is not None:
                self.pipeline.enter(visit.stage)
            if visit is self.visits[0]:
                self._put_in(parts)
            self._choose_first_tokens(visit, carried)
            self._work(visit, parts)
            carried.update((id(tensor), tensor.clone()) for tensor in visit.departures)
        return self.logits[: sum(len(tokens) for tokens, _ in parts)].clone()

    def _put_in(self, parts: Sequence[Part]) -> None:
        ids = [row for tokens, _ in parts for row in tokens]
        positions = [[length] for _, cache in parts for length in cache.lengths]
        over = [[0]] * (self.rows - len(ids))
        self.inputs.copy_(from_host([[*ids, *over], [*positions, *over]], self.inputs.device))

    def _choose_first_tokens(self, visit: StageVisit, carried: dict[int, torch.Tensor]) -> None:
        for source, local in visit.arrivals:
            value = carried[id(source)]
            if self.pipeline is not None:
                value = self.pipeline.bring(value, visit.device)
            local.copy_(value)

    def _work(self, visit: StageVisit, parts: Sequence[Part]) -> None:
        batches, first = [], 0
        for tokens, cache in parts:
            rows = slice(first, first := first + len(tokens))
            batches.append((rows, cache, DecodeMasks(cache.lengths, visit.device, self.added)))
        for work in visit.work:
            if isinstance(work, CapturedAttention):
                for batch in batches:
                    work.run(*batch)
            else:
                work()
