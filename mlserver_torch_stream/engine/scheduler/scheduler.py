"""Plans each step: which sequences decode, which chunks of prompts run in the same step, and which pages they use.

The scheduler only decides what to run, and returns the plan. This module does not import torch, run a model or read a
clock.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence, CacheSpec
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.ledger import Order, PageLedger, ScheduledSequence, StepPart
from mlserver_torch_stream.engine.scheduler.queue import FairQueue, PromptBudget, SchedulerLimits, fits_alone
from mlserver_torch_stream.engine.scheduler.restarts import Restarts
from mlserver_torch_stream.types import TokenLogprob

Busy = Collection[SequenceState]
Drafts = Callable[[SequenceState, int], Sequence[int]]
"""A callable that gets a sequence and the number of decoding sequences, and returns guesses of the next tokens, if
any.
"""

# When a prompt is admitted, there must be pages for this many further tokens of each running sequence. Measured with
# 150 requests of about 60 tokens, at most 32 at a time, in a full cache with pages of 16: 0 gave 32 preemptions in 206
# steps, 8 gave none in 224 steps, 16 gave none in 245 steps.
_SOON = 8
# A step that computes a prompt takes a further prompt only while there is room for so many tokens, because each chunk
# adds a sequence to the step and holds pages, however few its tokens are.
_SHORTEST_CHUNK = 16
# The maximum number of prompt rows that a step scores: 256 rows of 150,000 tokens take 150 MB in float32.
_MAX_SCORED_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The parts of one step, in the order of the batch's sequences. An empty plan has nothing to run.

    ``prompt_tokens`` counts the tokens of all prompt chunks, including the tokens of preempted sequences that are
    computed again.
    """

    parts: tuple[StepPart, ...] = ()
    batch: Batch = field(default_factory=lambda: Batch(()))
    prompt_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __str__(self) -> str:
        """Describes the step in words."""
        words = [f"the prefill of {prompts} tokens"] if (prompts := self.prompt_tokens) else []
        decoding = sum(not part.prefills for part in self.parts)
        words += [f"the decode step of {decoding} sequence{'s' if decoding > 1 else ''}"] if decoding else []
        return " and ".join(words)


class StepDraft:
    """A step while the scheduler plans it: its parts, its decoding sequences, and how many tokens are ``left``."""

    def __init__(
        self, limits: SchedulerLimits, page_size: int, *, decodes: bool, prompt_budget: PromptBudget | None = None
    ) -> None:
        """``decodes`` says whether sequences decode in this step.

        ``prompt_budget`` bounds the tokens of prompts, and what ``reserve`` returns.
        """
        self._limits = limits
        self._page_size = page_size
        self._parts: dict[ScheduledSequence, StepPart] = {}
        self._prompt_tokens = 0
        self.left = limits.budget(decodes=decodes)
        self._rows_left = _MAX_SCORED_ROWS
        self._shortest = max(min(page_size, _SHORTEST_CHUNK), limits.prefill_floor)
        self._prompt_budget = PromptBudget(math.inf) if prompt_budget is None else prompt_budget
        self._least = max(self._prompt_budget.least, limits.prefill_floor) if self._prompt_budget.least else 0
        self._cost_left = self._prompt_budget.cost
        self.decoding: list[ScheduledSequence] = []
        self.copies: list[tuple[int, int, int]] = []

    def __contains__(self, scheduled: ScheduledSequence) -> bool:
        return scheduled in self._parts

    @property
    def takes_prompts(self) -> bool:
        """Whether the step has room for more prompt tokens."""
        if self._limits.whole_prompts:
            return not self._prompt_tokens
        if min(self.left, self._rows_left) <= 0:
            return False
        if not self._prompt_tokens and self._least:
            return True
        return min(self.left, self._cost_left) >= self._shortest

    def chunk(self, scheduled: ScheduledSequence) -> int:
        """Returns how many of a prompt's next tokens the step takes; 0 if too few of them fit beside other prompts.

        If possible, the chunk ends at the end of a page. Then the next chunk can use the prefix cache if another
        sequence has meanwhile computed the chunk's first page.
        """
        start, tokens = scheduled.computed, scheduled.left
        unscored = scheduled.request.rows_to_score(start, start + tokens)
        left = min(self.left, self._affordable(start))
        most = min(left, tokens - unscored + self._rows_left) if unscored else left
        if self._limits.whole_prompts or tokens <= most:
            return tokens
        if most < self._shortest and (self._prompt_tokens or not self._least):
            self._cost_left = 0.0  # the step takes no later prompt either
            return 0
        end = start + int(most)
        whole = end // self._page_size * self._page_size
        return (whole if whole > start else end) - start

    def _affordable(self, start: int) -> float:
        """Returns how many tokens of a prompt, from position ``start`` on, fit into the rest of the prompt budget."""
        if self._cost_left == math.inf:
            return math.inf
        least = 0 if self._prompt_tokens else self._least
        return max(least, self._prompt_budget.fitting(self._cost_left, start))

    def add(self, scheduled: ScheduledSequence, count: int, *, decodes: bool) -> None:
        """Adds the next ``count`` tokens of a sequence, which has pages and a slot for them."""
        sequence, start = scheduled.sequence, scheduled.pages.computed
        end = start + count
        ends = end == sequence.length
        token_ids = sequence.token_ids(start, end)
        scored = 0 if decodes else scheduled.request.rows_to_score(start, end)
        batched = BatchSequence(token_ids, start, scheduled.pages.tables, max(int(ends), scored), scheduled.slot)
        part = StepPart(sequence, batched, scheduled.samples if ends else (), not decodes)
        scheduled.part = self._parts[scheduled] = part
        if decodes:
            self.decoding.append(scheduled)
        else:
            self._prompt_tokens += count
            self._rows_left -= scored
            weight = max(count, self._limits.prefill_floor)
            self.left -= weight
            self._cost_left -= self._prompt_budget.cost_of(start, weight)

    def reserve(self, made: dict[ScheduledSequence, Sequence[int]], *, beside_prompts: bool, start: int) -> None:
        """Shortens the drafts that were made for each sequence to what the limits and the prompt budget allow.

        With ``beside_prompts``, the drafts take at most half of the step's tokens, and leave enough for a chunk of the
        first prompt from its position ``start`` on. Their tokens and their time are deducted from those of the prompts.
        """
        per_draft = self._prompt_budget.per_draft if beside_prompts else 0.0
        most = min(self._prompt_budget.most_drafts, self.left)
        if beside_prompts:
            most = min(most, self.left / 2, self.left - max(self._shortest, self._least))
        if per_draft:
            most = min(most, (self._cost_left - self._prompt_budget.cost_of(start, self._least)) / per_draft)
        for scheduled, drafts in made.items():
            if len(drafts) > most:
                made[scheduled] = drafts = drafts[: max(0, int(most))]
            most -= len(drafts)
            self.left -= len(drafts)
            self._cost_left -= len(drafts) * per_draft

    def writes_next(self, scheduled: ScheduledSequence) -> bool:
        """Returns whether a prompt should wait, because this step writes the page that the prompt needs next.

        Only prompts whose scores are wanted have to wait. In the next step, the page and its scores exist, and the
        prompt can use them.
        """
        if not scheduled.request.unscored or not self._parts:
            return False
        pages = scheduled.pages.find_next(scheduled.sequence.length)
        return any(not pages.isdisjoint(other.pages.unwritten) for other in self._parts if pages)

    def add_drafts(self, scheduled: ScheduledSequence, drafts: Sequence[int]) -> None:
        """Adds drafts to the part of a sequence that decodes in this step."""
        part = self._parts[scheduled]
        part.drafts = tuple(drafts)
        part.input.token_ids = [*part.input.token_ids, *drafts]
        part.input.wanted += len(drafts)

    def plan(self, state_copies: Sequence[tuple[int, int]]) -> StepPlan:
        """Returns the finished plan, whose batch includes the page copies and ``state_copies``."""
        if not self._parts:
            return StepPlan()
        parts = tuple(self._parts.values())
        batch = Batch(tuple([part.input for part in parts]), tuple(self.copies), tuple(state_copies))
        return StepPlan(parts, batch, self._prompt_tokens)


class Scheduler:
    """Plans each step, and admits requests in the queue's order while sequences and pages are within the limits.

    ``ledger`` records which pages and slots the sequences hold, and ``restarts`` decides which sequences are computed
    again. ``admitted`` sequences are ordered by priority, then by admission, then by their index in the request.

    For each step, call ``plan = schedule(busy)`` and run the forward of ``plan.batch``. Then, for each part of the
    plan, call ``advance(part, tokens)`` and let its sequences accept their tokens. Finally, ``release`` the sequences
    that have ended. The sampled tokens show which drafts are right, so a part with drafts advances only after its
    sequence has accepted tokens.

    If a sequence lacks pages, the last of the admitted sequences after it is preempted: that sequence loses its pages,
    and is computed again when there are enough pages. So the first sequence always advances. The order of the parts in
    a batch matters, too: a part may read pages that an earlier part or an earlier batch writes.
    """

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, drafts: Drafts | None = None) -> None:
        """``drafts`` returns guesses of a sequence's next tokens.

        If a model has states or computes prompts whole, pages are not enough to continue a sequence, so there are
        neither drafts nor a prefix cache.
        """
        goes_on = not spec.state_bytes and not limits.whole_prompts
        finds = goes_on and limits.prefix_bytes > 0  # otherwise not even prompts of the same step share pages
        self.limits = limits
        self.ledger = PageLedger(limits, spec, finds=finds)
        self.restarts = Restarts(self.ledger)
        self.waiting = FairQueue()
        self.admitted: list[ScheduledSequence] = []
        self._admissions = count()
        self._spec = spec
        self.preemptions = 0  # since the start
        self.hit_tokens = 0  # prompt tokens found in the prefix cache since the start
        self._drafts = drafts if goes_on else None

    # --- arrival and departure ---

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""
        if fits_alone(self._spec, self.limits, sequences, prompt, final_length):
            return None
        return (
            f"{sequences} sequences of {final_length} tokens can never run: the limits are {self.limits.max_num_seqs} "
            f"sequences and {format_bytes(self.limits.cache_bytes)} of KV cache"
        )

    def add(self, request: RequestState) -> None:
        """Puts a request into the queue."""
        first, *forks = request.sequences
        self.ledger.add(first).forks = tuple(forks)
        self.waiting.add(request)

    def release(self, sequences: Iterable[SequenceState], *, forget: bool = False) -> list[SequenceState]:
        """Takes back the pages of sequences that have ended, and removes them from every queue.

        With ``forget`` the prefix cache forgets the pages, which may hold NaN. Returns the sequences whose part is
        void: they share pages that were not written, so they are computed again.
        """
        leaving = self.ledger.pop(sequences)
        void = self.restarts.void(leaving)
        for scheduled in leaving:
            self.ledger.clear(scheduled, forget=forget)
            if scheduled.admitted:
                self.admitted.remove(scheduled)
            elif scheduled.request in self.waiting:
                self.waiting.remove(scheduled.request)
        return void

    # --- gauges ---

    @property
    def running_sequences(self) -> int:
        """The number of sequences whose prompt has been computed."""
        return sum([bool(scheduled.sequence.tokens) for scheduled in self.admitted])

    @property
    def prefilling_requests(self) -> int:
        """The number of requests whose prompt is being computed."""
        return len(self.admitted) - self.running_sequences

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits and there is a place for it, is being computed, or is to be computed again."""
        return bool(self.waiting and self._places > 0) or any(not scheduled.decodes for scheduled in self.admitted)

    # --- the plan of a step ---

    def schedule(self, busy: Busy = (), prompt_budget: PromptBudget | None = None) -> StepPlan:
        """Plans the next step. The ``busy`` sequences are in flight: they keep their pages and are not in the plan.

        ``prompt_budget`` bounds the prompt tokens of the step in addition to the limits; None means that there are only
        the limits. A budget that would leave the engine with nothing to run is ignored.
        """
        plan = self._plan(busy, prompt_budget)
        return plan if plan or busy or prompt_budget is None else self._plan(busy, None)

    def _plan(self, busy: Busy, prompt_budget: PromptBudget | None) -> StepPlan:
        decoding = self._to_decode(busy)
        draft = StepDraft(self.limits, self._spec.page_size, decodes=bool(decoding), prompt_budget=prompt_budget)
        drafts = self._make_drafts(decoding, draft)
        for scheduled in list(self.admitted):
            if scheduled in decoding and not scheduled.restarts:
                self._take(scheduled, 1, draft, busy, decodes=True)
            elif scheduled.left and not scheduled.decodes and scheduled.sequence not in busy:
                self._admit_all(draft, busy, scheduled.priority)
                self._take_chunk(scheduled, draft, busy)
        self._admit_all(draft, busy)
        self._take_drafts(drafts, draft)
        plan = draft.plan(self.ledger.state_copies)
        if plan:
            self.ledger.state_copies = []
        return plan

    def _to_decode(self, busy: Busy) -> set[ScheduledSequence]:
        """Returns the sequences that may decode in this step.

        Each stage of a pipeline gets its share of the decoding sequences.
        """
        decoding = [scheduled for scheduled in self.admitted if scheduled.decodes]
        share = -(-len(decoding) // self.limits.stages)
        return set([scheduled for scheduled in decoding if scheduled.sequence not in busy][:share])

    def _take(self, scheduled: ScheduledSequence, tokens: int, draft: StepDraft, busy: Busy, *, decodes: bool) -> None:
        """Adds the next ``tokens`` tokens of an admitted sequence, or as many of them as there are pages for."""
        if decodes and scheduled.pages.has_room:  # the case of most sequences in most steps
            draft.add(scheduled, 1, decodes=True)
            return
        scheduled.pages.drop_passed()
        tokens = self.ledger.fitting(scheduled, tokens) or self._preempt(scheduled, tokens, draft, busy)
        if not tokens:
            return
        assert scheduled.part is None, "the sequence already has a part in flight"
        end = scheduled.computed + tokens
        self.ledger.take_slot(scheduled)
        copies = scheduled.pages.extend(end)
        scheduled.copied |= bool(copies)
        draft.copies += copies
        scheduled.pages.name(end)
        scheduled.restarts = False
        draft.add(scheduled, tokens, decodes=decodes)

    def _take_chunk(self, scheduled: ScheduledSequence, draft: StepDraft, busy: Busy) -> None:
        if not draft.takes_prompts or (scheduled.restarts and not self._may_restart(scheduled)):
            return
        scheduled.look_up()
        if draft.writes_next(scheduled):
            return
        # Even if the prefix cache has all tokens but the last, the step has not counted this as a decoding sequence.
        if tokens := draft.chunk(scheduled):
            self._take(scheduled, tokens, draft, busy, decodes=False)

    def _may_restart(self, scheduled: ScheduledSequence) -> bool:
        """Returns whether a preempted sequence may restart: it has enough free pages, or no earlier sequence has any.

        Otherwise the sequence would be preempted again and again.
        """
        if not any(other.holds_something for other in self.admitted if other.order < scheduled.order):
            return True
        return self.ledger.fits_for(scheduled, _added(scheduled.needed(self.limits), self._soon_needed()))

    def _make_drafts(
        self, decoding: Collection[ScheduledSequence], draft: StepDraft
    ) -> dict[ScheduledSequence, Sequence[int]]:
        """Returns the drafts of the sequences that decode.

        They come before the prompts, because they save time.
        """
        made: dict[ScheduledSequence, Sequence[int]] = {}
        if self._drafts is None:
            return made
        for scheduled in self.admitted:
            if scheduled in decoding and (drafts := self._drafts(scheduled.sequence, len(decoding))):
                most = scheduled.request.max_tokens - len(scheduled.sequence.tokens) - 1
                made[scheduled] = drafts[: max(0, most)]
        if made:
            start = next((scheduled.computed for scheduled in self.admitted if not scheduled.decodes), 0)
            draft.reserve(made, beside_prompts=self.has_prompts, start=start)
        return made

    def _take_drafts(self, made: Mapping[ScheduledSequence, Sequence[int]], draft: StepDraft) -> None:
        """Adds the drafts to the decoding sequences, as far as there are pages."""
        for scheduled in draft.decoding if made else ():
            drafts = made.get(scheduled, ())
            end = scheduled.sequence.length + len(drafts)
            if drafts and self.ledger.fits(scheduled.pages.lacking(end)):
                scheduled.pages.grow(end)
                draft.add_drafts(scheduled, drafts)

    # --- admission ---

    def _admit_all(self, draft: StepDraft, busy: Busy, below: float = math.inf) -> None:
        """Admits requests with a priority number below ``below`` while the step has room for prompt tokens."""
        admitted = True
        while admitted and draft.takes_prompts:
            admitted = self._admit(draft, busy, below)

    def _admit(self, draft: StepDraft, busy: Busy, below: float) -> bool:
        """Admits the next request with a priority number below ``below``, and adds its first chunk.

        Returns False if no request fits.
        """
        if not self.waiting:
            return False
        places, below = self._places, min(below, self._restarting_priority)
        if places <= 0 or not self.waiting.has_before(below):
            return False
        reserved = self._reserved()
        if not self.ledger.fits(reserved):
            return False  # saves useless look-ups of the queue's prompts in the prefix cache

        def fits(request: RequestState) -> bool:
            if request.params.n > places or request.input.priority >= below:
                return False
            return self._prompt_fits(self.ledger[request.sequences[0]], reserved)

        request = self.waiting.admit(fits)
        if request is None:
            return False
        scheduled = self.ledger[request.sequences[0]]
        self._insert(scheduled, (request.input.priority, next(self._admissions), 0))
        self._take_chunk(scheduled, draft, busy)
        return True

    def _insert(self, scheduled: ScheduledSequence, order: Order) -> None:
        scheduled.order, scheduled.admitted = order, True
        insort(self.admitted, scheduled, key=lambda each: each.order)

    def _prompt_fits(self, scheduled: ScheduledSequence, reserved: list[int]) -> bool:
        """Returns whether there are pages for the prompt's unshared part, in addition to the ``reserved`` pages."""
        scheduled.look_up()
        needed = _added(scheduled.needed_with_forks(self.limits), reserved)
        if self.ledger.fits_for(scheduled, needed, 1 + len(scheduled.forks)):
            return True
        self.ledger.clear(scheduled)
        return False

    @property
    def _places(self) -> int:
        """The number of further sequences that may be admitted."""
        return self.limits.max_num_seqs - sum(1 + len(scheduled.forks) for scheduled in self.admitted)

    @property
    def _restarting_priority(self) -> float:
        """The lowest priority number of the sequences that have lost their pages; infinity without such sequences."""
        return min((scheduled.priority for scheduled in self.admitted if scheduled.restarts), default=math.inf)

    def _soon_needed(self) -> list[int]:
        """Returns how many pages of each group the running sequences will need soon.

        These pages are reserved, because otherwise an admitted request would soon cause a running sequence to be
        preempted.
        """
        pages = math.ceil(self.running_sequences * min(1.0, _SOON / self._spec.page_size))
        return [pages] * len(self._spec.groups)

    def _reserved(self) -> list[int]:
        """Returns how many pages running sequences need soon, plus how many pages started prompts still need."""
        reserved = self._soon_needed()
        for scheduled in self.admitted:
            if not scheduled.decodes and not scheduled.restarts:
                reserved = _added(reserved, scheduled.needed_with_forks(self.limits))
        return reserved

    # --- preemption ---

    def _preempt(self, scheduled: ScheduledSequence, tokens: int, draft: StepDraft, busy: Busy) -> int:
        """Preempts later sequences until this sequence can get its next page.

        If prompts are computed whole, the sequence must be able to get all its pages. Returns for how many of the next
        ``tokens`` tokens there are pages then.
        """
        size, start = self._spec.page_size, scheduled.computed
        least = tokens if self.limits.whole_prompts else min(tokens, size - start % size)
        while not self.ledger.fits_for(scheduled, scheduled.pages.missing(start + least)):
            victim = self._victim(scheduled, draft, busy)
            if victim is None:
                return 0
            self.ledger.restart(victim)
            self.preemptions += 1
        return least

    def _victim(self, scheduled: ScheduledSequence, draft: StepDraft, busy: Busy) -> ScheduledSequence | None:
        """Returns the last sequence after this one that holds pages and is not in this step or in flight, or None."""
        after = takewhile(lambda each: each is not scheduled, reversed(self.admitted))
        idle = (each for each in after if each.sequence not in busy and each not in draft)
        return next((each for each in idle if each.holds_something), None)

    # --- after the forward ---

    def add_scores(self, part: StepPart, scores: Sequence[TokenLogprob]) -> None:
        """Appends ``scores`` to the prompt's scores. The part must have advanced."""
        self.ledger[part.sequence].add_scores(scores)

    def advance(self, part: StepPart, tokens: int) -> bool:
        """Counts the first ``tokens`` tokens of a part as computed: ``part.count``, or fewer if drafts were rejected.

        Returns False if the part is void. If the part ends a prompt, the other sequences of the request are forked from
        this one.
        """
        if self.ledger.is_void(part):
            return False
        scheduled = self.ledger[part.sequence]
        scheduled.advance(part, tokens)
        if part.samples and not scheduled.sequence.tokens:
            scheduled.request.cached_tokens = scheduled.found
            self.hit_tokens += scheduled.found
            scheduled.found = 0
            self._fork(scheduled)
        return True

    def _fork(self, scheduled: ScheduledSequence) -> None:
        forks, scheduled.forks = scheduled.forks, ()
        priority, admission, _ = scheduled.order
        for position, sequence in enumerate(forks, 1):
            if sequence.finish_reason is None:
                self._insert(self.ledger.fork(scheduled, sequence), (priority, admission, position))


def _added(*pages: list[int]) -> list[int]:
    """Returns the sums of several page counts, group by group."""
    return [sum(each) for each in zip(*pages, strict=True)]
