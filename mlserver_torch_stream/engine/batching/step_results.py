"""Says what came of the forward of one step: the logits of each of its sequences, or why there are none.

A forward that raises is tried again for each sequence alone. The pages of a batch make that safe: a sequence writes the
same keys and values to the same pages. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan

Run = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class ComputedPart:
    """A part of a step whose forward came back. ``row`` is the first of its rows of logits."""

    part: ScheduledSequence
    token_ids: Sequence[int]
    row: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """``void`` are sequences that share pages which a failed one should have computed in this step."""

    computed: tuple[ComputedPart, ...]
    logits: torch.Tensor
    failures: dict[ScheduledSequence, Exception] = field(default_factory=dict)
    void: tuple[SequenceState, ...] = ()

    def without(self, sequences: Collection[SequenceState]) -> StepResult:
        return replace(self, computed=tuple(each for each in self.computed if each.part.sequence not in sequences))


NO_RESULT = StepResult((), torch.empty(0))


def whole_result(plan: StepPlan, logits: torch.Tensor) -> StepResult:
    return _result(list(zip(plan.scheduled, plan.batch.sequences, strict=True)), logits)


def each_alone(plan: StepPlan, page_size: int, run: Run, error: Exception) -> StepResult:
    """Runs each sequence of a plan alone after the forward of all raised ``error``.

    If none raises alone, the batch itself is at fault (for memory, say): all fail, as each later try would.
    """
    pairs = list(zip(plan.scheduled, plan.batch.sequences, strict=True))
    failures: dict[ScheduledSequence, Exception] = {}
    computed: list[tuple[ScheduledSequence, BatchSequence]] = []
    logits: list[torch.Tensor] = []
    void: list[SequenceState] = []
    missing: set[tuple[int, int]] = set()  # (group, page)
    for part, each in pairs if len(pairs) > 1 else ():
        if missing.isdisjoint(_pages(each, 0, page_size)):
            try:
                logits.append(run(_alone(plan.batch, each)).clone())  # the next call may overwrite them
                computed.append((part, each))
                continue
            except Exception as failure:
                failures[part] = failure
        else:
            void.append(part.sequence)
        missing |= _pages(each, each.start, page_size)
    if not failures:
        return replace(NO_RESULT, failures=dict.fromkeys(plan.scheduled, error))
    result = _result(computed, torch.cat(logits)) if logits else NO_RESULT
    return replace(result, failures=failures, void=tuple(void))


def _result(pairs: Sequence[tuple[ScheduledSequence, BatchSequence]], logits: torch.Tensor) -> StepResult:
    rows = accumulate((each.wanted for _, each in pairs), initial=0)
    computed = (ComputedPart(part, each.token_ids, row) for (part, each), row in zip(pairs, rows, strict=False))
    return StepResult(tuple(computed), logits)


def _alone(batch: Batch, each: BatchSequence) -> Batch:
    """Returns a batch of one sequence, with its copies: the failed forward may have made them or not."""
    pages, slot = _pages(each, 0, 1), each.state_slot
    return Batch(
        (each,),
        tuple(copy for copy in batch.copies if (copy[0], copy[2]) in pages),
        tuple(copy for copy in batch.state_copies if copy[1] == slot),
    )


def _pages(each: BatchSequence, start: int, page_size: int) -> set[tuple[int, int]]:
    """Returns (group, page) of the pages that hold the tokens from ``start`` on."""
    return {
        (group, page) for group, table in enumerate(each.tables) for page in table[start // page_size :] if page >= 0
    }
