"""Defines the plan of one step and its parts, and the account of each sequence that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.cache.page_pool import PagePool
from mlserver_torch_stream.engine.cache.sequence_pages import SequencePages
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduler.limits import SchedulerLimits


@dataclass(eq=False, slots=True)  # a frozen dataclass takes three times as long to create
class ScheduledSequence:
    """A sequence's part of a step, in the same place as its ``BatchSequence``.

    ``samples`` are the sequences that get a token from the logits of this part. A chunk before the end of a prompt has
    none, the last chunk has all ``n`` of the request, and a decoding sequence has itself. ``drafts`` are the guessed
    tokens at the end of the part, which the step verifies. ``prefills``: the part is a chunk of a prompt, or of a
    sequence that resumes after preemption.
    """

    sequence: SequenceState
    start: int
    count: int
    samples: tuple[SequenceState, ...]
    prefills: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The sequences of one step and their batch. An empty plan has nothing to run.

    ``prompt_tokens`` are those of all chunks of prompts and of sequences that resume.
    """

    scheduled: tuple[ScheduledSequence, ...] = ()
    batch: Batch = field(default_factory=lambda: Batch(()))
    prompt_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    def __str__(self) -> str:
        """Describes the step in words."""
        parts = [f"the prefill of {prompts} tokens"] if (prompts := self.prompt_tokens) else []
        decoding = sum(not part.prefills for part in self.scheduled)
        parts += [f"the decode step of {decoding} sequence{'s' if decoding > 1 else ''}"] if decoding else []
        return " and ".join(parts)


NO_SLOT = -1

Order = tuple[int, int, int]  # priority, number of the admission, index in the request


class SequenceAccount:
    """``forks`` are the sequences of its request that go on from the end of the prompt that this one computes."""

    def __init__(self, sequence: SequenceState, spec: CacheSpec, pool: PagePool) -> None:
        self.sequence = sequence
        self.request = sequence.request  # kept alive here: the sequence does not do that
        self._spec = spec
        self.forks: tuple[SequenceState, ...] = ()
        self.pages = SequencePages(spec, pool, sequence.token_ids)
        self.slot = NO_SLOT
        self.order: Order = (0, 0, 0)
        self.part: ScheduledSequence | None = None  # planned, and not back from its forward
        self.found = 0  # tokens of the prompt that the prefix cache had
        self.admitted = False
        self.restarts = False  # it was admitted and has lost its pages
        self.began_anew = False  # so tokens that the prefix cache has are no hits any more
        self.copied = False  # a copy for it is not back from its forward: of a page, or of states

    @property
    def computed(self) -> int:
        return self.pages.computed

    @property
    def left(self) -> int:
        """Tokens that can be computed now. An open prompt keeps its last token, for the logits at its end."""
        return self.sequence.length - self.pages.computed - (not self.request.sealed)

    @property
    def decodes(self) -> bool:
        """Whether its newest token is all that it needs computed.

        A sequence that has lost its pages resumes, even where the prefix cache has all but its last token.
        """
        return bool(self.sequence.tokens) and not self.restarts and self.left == 1

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def samples(self) -> tuple[SequenceState, ...]:
        """The sequences that get a token at the end of its tokens."""
        return (self.sequence, *[fork for fork in self.forks if fork.finish_reason is None])

    @property
    def holds_something(self) -> bool:
        return any(self.pages.held) or self.slot != NO_SLOT

    def needed(self, limits: SchedulerLimits) -> list[int]:
        """Returns how many more pages of each group it needs until all its tokens are computed."""
        tokens = self.sequence.length
        most = self._spec.most_pages(tokens, limits.chunk(tokens))
        return [max(0, pages - held) for pages, held in zip(most, self.pages.held, strict=True)]

    def needed_with_forks(self, limits: SchedulerLimits) -> list[int]:
        """Returns ``needed``, and the page of each group that each of its forks copies."""
        return [pages + len(self.forks) for pages in self.needed(limits)]

    def look_up(self) -> None:
        """Takes the pages that the prefix cache has of all tokens but the last one, whose logits are needed."""
        gained = self.pages.look_up(self.sequence.length - 1)
        if not self.began_anew:
            self.found += gained

    def advance(self, part: ScheduledSequence, tokens: int) -> None:
        """Counts the first ``tokens`` of its part, whose forward is back, as computed."""
        self.part = None
        self.copied = False
        self.pages.computed = part.start + tokens
        if part.drafts:  # those that are accepted may have filled pages
            self.pages.name(min(self.computed, self.sequence.length))
        self.pages.written = self.pages.named

    def cut(self, kept: int) -> None:
        """Keeps the computed ones of a prompt's first ``kept`` tokens, but leaves at least one token to compute."""
        self.pages.cut(min(kept, self.sequence.length - 1))
        self.found = min(self.found, self.pages.computed)


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
