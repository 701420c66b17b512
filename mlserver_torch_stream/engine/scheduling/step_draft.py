"""Collects the parts of one step while the scheduler decides, and makes the plan of them.

Knows nothing of the order of sequences, nor of free pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.sequence_account import SequenceAccount
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan

Copies = list[tuple[int, int, int]]


@dataclass(slots=True)
class _Part:
    account: SequenceAccount
    start: int
    count: int
    decodes: bool
    drafts: Sequence[int] = ()


class StepDraft:
    """Has ``left`` tokens of the budget, and ``prompts`` chunks of prompts. Keeps the parts in their order."""

    def __init__(self, limits: SchedulerLimits, page_size: int, *, decodes: bool) -> None:
        """``decodes``: whether sequences decode in this step."""
        self._limits = limits
        self._page_size = page_size
        self._parts: dict[SequenceAccount, _Part] = {}
        self.left = limits.budget(decodes=decodes)
        self.prompts = 0
        self.copies: Copies = []

    def __contains__(self, account: SequenceAccount) -> bool:
        return account in self._parts

    @property
    def takes_prompts(self) -> bool:
        return not self.prompts if self._limits.whole_prompts else self.left > 0

    @property
    def decoding(self) -> list[_Part]:
        return [part for part in self._parts.values() if part.decodes]

    def chunk(self, start: int, tokens: int) -> int:
        """Returns how many of a prompt's next ``tokens`` the step takes. A chunk ends with a page if it can.

        Then the next chunk may find its first page in the prefix cache, if another sequence has computed that page.
        """
        if self._limits.whole_prompts or tokens <= self.left:
            return tokens
        end = start + int(self.left)
        whole = end // self._page_size * self._page_size
        return (whole if whole > start else end) - start

    def add(self, account: SequenceAccount, count: int, *, decodes: bool) -> None:
        self._parts[account] = _Part(account, account.computed, count, decodes)
        if not decodes:
            self.prompts += 1
            self.left -= max(count, self._limits.prefill_floor)

    def add_drafts(self, part: _Part, drafts: Sequence[int]) -> None:
        part.drafts = drafts
        self.left -= len(drafts)

    def plan(self, state_copies: Sequence[tuple[int, int]]) -> StepPlan:
        parts = list(self._parts.values())
        scheduled = tuple(_scheduled(part) for part in parts)
        for part, each in zip(parts, scheduled, strict=True):
            part.account.part = each
        sequences = tuple(_in_batch(part, each) for part, each in zip(parts, scheduled, strict=True))
        return StepPlan(scheduled, Batch(sequences, tuple(self.copies), tuple(state_copies)))


def _scheduled(part: _Part) -> ScheduledSequence:
    account = part.account
    sequence, end = account.sequence, part.start + part.count
    ends = sequence.request.sealed and end == sequence.length
    count, samples = part.count + len(part.drafts), account.samples if ends else ()
    return ScheduledSequence(sequence, part.start, count, samples, not part.decodes, tuple(part.drafts))


def _in_batch(part: _Part, scheduled: ScheduledSequence) -> BatchSequence:
    account, end = part.account, part.start + part.count
    return BatchSequence(
        token_ids=[*account.sequence.token_ids(part.start, end), *part.drafts],
        start=part.start,
        tables=tuple(table[:] for table in account.pages.tables),
        wanted=1 + len(part.drafts) if scheduled.samples else 0,
        state_slot=account.slot,
    )
