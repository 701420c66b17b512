"""Holds the result of a step's forward: the logits of each of its sequences, or the reason why there are none.

If the forward of all sequences raises, each sequence runs again alone. That is safe for its pages: a sequence writes
the same keys and values to the same pages. The copies of the batch are not made again, as another sequence may have
taken the source page. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.client_messages import drop_tracebacks
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan

Run = Callable[[Batch], Logits]


@dataclass(eq=False, slots=True)
class ComputedPart:
    """A part of a step whose forward came back. Its rows of logits begin at ``first_row``."""

    part: ScheduledSequence
    token_ids: Sequence[int]
    first_row: int

    @property
    def is_stale(self) -> bool:
        """Whether the prompt was sealed with other ids while the forward ran."""
        part = self.part
        if not part.prefills:
            return False
        prompt = part.sequence.request.prompt[part.start : part.start + part.count]
        return prompt != list(self.token_ids)[: len(prompt)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """``logits`` of the parts that were computed; ``failures`` are the errors of the others."""

    computed: Sequence[ComputedPart]
    logits: Logits
    failures: dict[ScheduledSequence, Exception] = field(default_factory=dict)

    def without(self, sequences: Collection[SequenceState]) -> StepResult:
        if not sequences:
            return self
        return replace(self, computed=[each for each in self.computed if each.part.sequence not in sequences])


NO_RESULT = StepResult((), Logits(torch.empty(0)))


def whole_result(plan: StepPlan, logits: Logits) -> StepResult:
    return _result(zip(plan.scheduled, plan.batch.sequences, strict=True), logits)


def each_alone(plan: StepPlan, void: Collection[SequenceState], run: Run, error: Exception) -> StepResult:
    """Runs each sequence of a plan alone, except the ``void`` ones. ``error`` is that of the forward of all sequences.

    So if only the batch fails, for example for its memory, no sequence does. A plan of one sequence is not run again.
    """
    if len(plan.scheduled) == 1:
        return replace(NO_RESULT, failures=dict.fromkeys(plan.scheduled, error))
    failures: dict[ScheduledSequence, Exception] = {}
    computed: list[tuple[ScheduledSequence, BatchSequence]] = []
    logits: list[torch.Tensor] = []
    for part, each in zip(plan.scheduled, plan.batch.sequences, strict=True):
        if part.sequence in void:
            continue
        try:
            logits.append(run(Batch((each,))).tensor.clone())  # the next call may overwrite them
            computed.append((part, each))
        except Exception as failure:
            drop_tracebacks(failure)
            failures[part] = failure
    result = _result(computed, Logits(torch.cat(logits))) if logits else NO_RESULT
    return replace(result, failures=failures)


def _result(pairs: Iterable[tuple[ScheduledSequence, BatchSequence]], logits: Logits) -> StepResult:
    row, computed = 0, []
    for part, each in pairs:
        computed.append(ComputedPart(part, each.token_ids, row))
        row += each.wanted
    return StepResult(computed, logits)
