"""Collects the parts of one step while the scheduler decides, and makes the plan of them.

Knows nothing of the order of sequences, nor of free pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.sequence_account import SequenceAccount
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan

Copies = list[tuple[int, int, int]]


class StepDraft:
    """Has ``left`` tokens of the budget. Keeps the parts in their order, and the accounts of those that decode."""

    def __init__(self, limits: SchedulerLimits, page_size: int, *, decodes: bool) -> None:
        """``decodes``: whether sequences decode in this step."""
        self._limits = limits
        self._page_size = page_size
        self._parts: dict[SequenceAccount, tuple[ScheduledSequence, BatchSequence]] = {}
        self._prompt_tokens = 0
        self.left = limits.budget(decodes=decodes)
        self.decoding: list[SequenceAccount] = []
        self.copies: Copies = []

    def __contains__(self, account: SequenceAccount) -> bool:
        return account in self._parts

    @property
    def takes_prompts(self) -> bool:
        return not self._prompt_tokens if self._limits.whole_prompts else self.left > 0

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
        """Adds the next ``count`` tokens of a sequence, which has pages and a slot for them."""
        sequence, start = account.sequence, account.pages.computed
        ends = start + count == sequence.length and account.request.sealed
        samples, ids = account.samples if ends else (), sequence.token_ids(start, start + count)
        account.part = part = ScheduledSequence(sequence, start, count, samples, not decodes)
        batched = BatchSequence(ids, start, account.pages.tables, int(ends), account.slot)
        self._parts[account] = part, batched
        if decodes:
            self.decoding.append(account)
        else:
            self._prompt_tokens += count
            self.left -= max(count, self._limits.prefill_floor)

    def add_drafts(self, account: SequenceAccount, drafts: Sequence[int]) -> None:
        part, batched = self._parts[account]
        account.part = part = replace(part, count=part.count + len(drafts), drafts=tuple(drafts))
        batched = replace(batched, token_ids=[*batched.token_ids, *drafts], wanted=batched.wanted + len(drafts))
        self._parts[account] = part, batched
        self.left -= len(drafts)

    def plan(self, state_copies: Sequence[tuple[int, int]]) -> StepPlan:
        if not self._parts:
            return StepPlan()
        scheduled, sequences = zip(*self._parts.values(), strict=True)
        return StepPlan(scheduled, Batch(sequences, tuple(self.copies), tuple(state_copies)), self._prompt_tokens)
